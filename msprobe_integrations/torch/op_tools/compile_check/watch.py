"""A module whose calls run compiled and are kept, to be made again uncompiled and in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from msprobe_engine.accuracy.compile_report import FAILED, ModuleDiff, TensorDiff
from msprobe_engine.core.guard import Faults, Guard, raise_of_training
from msprobe_integrations.torch.op_tools.compile_check.graphs import Graphs, disable_compile
from msprobe_integrations.torch.op_tools.compile_check.runs import Call, Outcome, run
from msprobe_integrations.torch.op_tools.compile_check.taker import Taker
from msprobe_integrations.torch.op_tools.compile_check.truth import exact
from msprobe_integrations.torch.op_tools.compile_check.verdict import noise, verdict

KEPT_CALLS = 8
"""Calls of one module that are compared in one collection; more are counted."""


class Kept:
    """One call: how to make it again, what it gave, what came back."""

    def __init__(self, call: Call, versions: list[int], guard: Callable[[], Guard]) -> None:
        self.call, self.versions, self._guard = call, versions, guard
        self.outputs: list[Any] = []
        self.gradients: list[torch.Tensor | None] = []

    def results(self, result: Any) -> None:
        """The call has returned."""
        leaves = pytree.tree_leaves(result)
        self.outputs = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.gradients = [None] * len(leaves)
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._taker(n))

    def _taker(self, n: int) -> Callable[[torch.Tensor | None], None]:
        def add_gradient(gradient: torch.Tensor | None) -> None:
            if gradient is None:  # of an output that the loss does not use
                return
            with self._guard():
                known = self.gradients[n]
                self.gradients[n] = gradient.detach().clone() if known is None else known + gradient

        return disable_compile(add_gradient)


class Watched:
    """Compiles the calls of one module.

    Args:
        cast: autocast type around every call; None.
        faults: where faults of keeping go.
    """

    def __init__(self, name: str, module: nn.Module, graphs: Graphs, cast: torch.dtype | None, faults: Faults) -> None:
        self.name, self.module, self.graphs, self._cast, self._faults = name, module, graphs, cast, faults
        self.calls: list[Kept] = []
        self.more = 0
        self.keeps = True
        self.taker: Taker | None = None
        """Takes every call, in place of keeping it."""
        self._before = module._compiled_call_impl
        self._compiled = graphs.compile_module(module)
        module._compiled_call_impl = disable_compile(self._call)

    def remove(self) -> None:
        """The module runs as before."""
        self.module._compiled_call_impl = self._before
        self.calls.clear()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        kept = None
        if self.keeps and self._faults.is_enabled(self.name):
            with self._faults.guard(self.name):
                if len(self.calls) < KEPT_CALLS:
                    kept = Kept(Call.of(self.module, args, kwargs, self._cast), self._versions(), lambda: self._faults.guard(self.name))
                else:
                    self.more += 1
        name = self.taker.record_inputs(self.module, args, kwargs) if self.taker is not None else ""
        result = self.call_compiled(*args, **kwargs)
        if self.taker is not None:
            self.taker.record_outputs(name, result)
        if kept is not None:
            with self._faults.guard(self.name):
                kept.results(result)
                self.calls.append(kept)
        return result

    def call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled call, in the autocast region."""
        self.graphs.owner = self.name
        device = next((p.device.type for p in self.module.parameters()), "cpu")
        with _many_compilations(), nullcontext() if self._cast is None else torch.autocast(device, dtype=self._cast):
            return self._compiled(*args, **kwargs)

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.module.parameters()]

    def compare(self, threshold: float | None, inputs: bool, reference: bool) -> list[ModuleDiff]:
        """Make the calls again and compare.

        Args:
            threshold: of `verdict`.
            inputs: list the inputs, too.
            reference: run in float64.
        """
        found = [self._one(n, kept, threshold, inputs, reference) for n, kept in enumerate(self.calls)]
        if self.more and found:
            found[-1].note = " ".join(filter(None, (found[-1].note, f"{self.more} more calls were not compared")))
        return found

    def _one(self, number: int, kept: Kept, threshold: float | None, inputs: bool, reference: bool) -> ModuleDiff:
        diff = ModuleDiff(self.name if number == 0 else f"{self.name}#{number}")
        call, gradients = kept.call, kept.gradients if any(g is not None for g in kept.gradients) else None
        runs = self.graphs.runs
        try:
            again = run(self.call_compiled, self.module, call, gradients)
        except Exception as error:
            raise_of_training(error)
            diff.note = f"FAIL: compiled code cannot be run again: {_short(error)}"
            return diff
        try:
            eager = self._eager(call, gradients)
        except Exception as error:
            raise_of_training(error)
            diff.note = f"FAIL: uncompiled code raises: {_short(error)}"
            return diff
        truth: Outcome | None = None
        changed: list[Outcome] = []
        problem = ""
        if reference:
            try:
                truth, changed = exact(self.module, call, gradients)
            except Exception as error:  # of any operation that float64 does not have
                raise_of_training(error)
                problem = f"no float64 run: {_short(error)}"
        if self.graphs.runs == runs:
            problem = "SKIP: no part of it was compiled"
        compiled = again
        if self._versions() == kept.versions:
            compiled = again._replace(outputs=kept.outputs)
        else:
            problem = " ".join(filter(None, (problem, "parameters have changed since: the call was made again with the new ones")))
        unit = call.unit(list(self.module.parameters()))
        compare = _Compare(threshold, "" if unit is None else str(unit), eager, compiled, truth, changed)
        diff.fwd_output = (
            compare.group("outputs", [""] * len(eager.outputs)) if len(eager.outputs) == len(compiled.outputs) else _count(eager, compiled)
        )
        if inputs:
            diff.fwd_input = [d for d in compare.group("given", [""] * len(eager.given)) if d.shape or "torch" in d.dtype] or None
        if gradients is not None:
            names = [name for name, _ in self.module.named_parameters()]
            diff.grad_input = compare.group("inputs", [""] * len(eager.inputs)) or None
            diff.grad_parameter = compare.group("parameters", names) or None
            if failed := next(
                (f"{side} code: {o.problem}" for side, o in (("uncompiled", eager), ("compiled", compiled)) if o.problem), ""
            ):
                problem = f"FAIL: no gradients of {failed}"
        diff.note = problem
        return diff

    def _eager(self, call: Call, gradients: Sequence[torch.Tensor | None] | None) -> Outcome:
        compiled_call, self.module._compiled_call_impl = self.module._compiled_call_impl, None
        try:
            return run(torch.compiler.disable(self.module), self.module, call, gradients)
        finally:
            self.module._compiled_call_impl = compiled_call


def _many_compilations() -> AbstractContextManager[Any]:
    """Modules of one class share the code that dynamo compiles where it cannot take in a whole call: its limit is not for them."""
    config: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    patched: AbstractContextManager[Any] = config.patch({name: 1024})
    return patched


class _Compare:
    def __init__(
        self, threshold: float | None, unit: str, eager: Outcome, compiled: Outcome, truth: Outcome | None, changed: Sequence[Outcome]
    ) -> None:
        self._threshold, self._unit = threshold, unit
        self._eager, self._compiled, self._truth, self._changed = eager, compiled, truth, changed

    def group(self, kind: str, names: Sequence[str]) -> list[TensorDiff]:
        """Verdicts of one field of the outcomes; what neither side has is left out."""
        eager, compiled = getattr(self._eager, kind), getattr(self._compiled, kind)
        truth = getattr(self._truth, kind) if self._truth is not None else [None] * len(eager)
        truth = truth if len(truth) == len(eager) else [None] * len(eager)
        changed = [values for run in self._changed if len(values := getattr(run, kind)) == len(eager)]
        rates = sorted(rate for e, t in zip(eager, truth) if (rate := noise(e, t)) is not None)
        usual = rates[len(rates) // 2] if rates else 0.0
        diffs = []
        for n, name in enumerate(names):
            if eager[n] is None and compiled[n] is None:
                continue
            others = [values[n] for values in changed]
            diffs.append(
                verdict(eager[n], compiled[n], truth[n], others, threshold=self._threshold, unit=self._unit, usual=usual, name=name)
            )
        return diffs


def _count(eager: Outcome, compiled: Outcome) -> list[TensorDiff]:
    text = f"{len(eager.outputs)} outputs uncompiled, {len(compiled.outputs)} compiled"
    return [TensorDiff(float("inf"), float("inf"), float("inf"), False, (), FAILED, text)]


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
