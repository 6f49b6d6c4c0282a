"""Looks at the training's calls: each is made a second time, when it can be, and the results are held against each other.

The training's own call comes first and is left alone. What the second one works on is never written to: calls that write into their
arguments are repeated on copies that were taken before. Calls that have drawn random numbers are not repeated. What a second run has
against its arguments is counted, not raised.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from msprobe_engine.accuracy.free_benchmark import perturb
from msprobe_engine.accuracy.free_benchmark.perturb import Unperturbed
from msprobe_engine.accuracy.free_benchmark.preheat import Preheat
from msprobe_engine.core.guard import Faults, raise_of_training
from msprobe_integrations.common.op_tools.free_benchmark.choice import PART, Choice
from msprobe_integrations.torch.op_tools.free_benchmark.calls import apart, left_out, writes
from msprobe_integrations.torch.op_tools.free_benchmark.cpu import agreement
from msprobe_integrations.torch.op_tools.free_benchmark.gradients import Gradients
from msprobe_integrations.torch.op_tools.free_benchmark.pending import Pending, Waiting
from msprobe_integrations.torch.op_tools.free_benchmark.second import (
    Change,
    Seen,
    find_autocast_type,
    low,
    on_cpu,
    outputs_of,
    precision,
    raise_precision,
    replace_devices,
    runs,
)
from msprobe_integrations.torch.op_tools.free_benchmark.values import kind, mapped, measure_difference, tensors_of

CUSTOM = "Autograd"


class Checker:
    """All methods are called on the training thread; gradients may come on threads of autograd.

    Args:
        choice: which calls, and what becomes of the verdicts.
        budget: bytes that copies of arguments may take, and what is kept for gradients.
        preheat: learns thresholds; None: they are those of the types.
    """

    def __init__(self, choice: Choice, faults: Faults, budget: int, preheat: Preheat | None) -> None:
        self._choice, self._faults, self._budget = choice, faults, budget
        self._mode = choice.mode
        self._preheat = preheat
        self._pending = Pending(choice, preheat)
        self._gradients = Gradients(choice, self._pending, faults, budget) if choice.backward else None
        self._write: set[tuple[str, Any]] = set()
        """What has turned out to change its arguments."""

    def before(self, prefix: str, api: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Seen | None:
        """A call begins. Returns what `after` wants, None when it is not looked at."""
        base = f"{prefix}.{api}"
        name, wanted = self._choice.name(base)
        if not wanted or not self._faults.is_enabled(PART):
            return None
        with self._faults.guard(PART), torch._C.DisableTorchFunction():
            try:
                return self._before(prefix, api, base, name, func, (args, kwargs))
            except Unperturbed as error:
                self._choice.table.get_counts(base).skip(str(error))
        return None

    def _before(self, prefix: str, api: str, base: str, name: str, func: Callable[..., Any], arguments: Any) -> Seen | None:
        why = left_out(prefix, api, *arguments)
        if why is None and prefix == CUSTOM and self._choice.kept is None:
            why = "a custom autograd.Function: it may communicate; name it in list to run it again"
        if why is not None:
            raise Unperturbed(why)
        if self._preheat is not None and self._preheat.counting:
            self._preheat.call(base)
            return None
        tensors = tensors_of(arguments)
        if not any(tensor.is_floating_point() for tensor in tensors) and self._mode != perturb.NO_CHANGE:
            raise Unperturbed("no float input")
        written = writes(func, api, *arguments) or (base, _code(func)) in self._write
        if written and self._choice.fix:
            raise Unperturbed("changes its input")
        if written and sum(tensor.nbytes for tensor in tensors) > self._budget:
            raise Unperturbed("changes its input, which is larger than memory_budget_mb")
        seen = Seen.before(base, name, func, arguments, written)
        if self._mode == perturb.IMPROVE and not low(arguments, seen.autocast):
            raise Unperturbed("nothing in low precision")
        return seen

    def after(self, seen: Seen, result: Any) -> Any:
        """The training has made the call. Returns its result, or what takes its place."""
        with self._faults.guard(PART), torch._C.DisableTorchFunction():
            try:
                if seen.random.has_drawn():
                    raise Unperturbed("random")
                if not seen.writes and seen.versions.find_written():
                    self._write.add((seen.base, _code(seen.func)))
                    raise Unperturbed("changes its input, which was not known before")
                if self._choice.fix:
                    return self._replace_result(seen, result)
                if self._gradients is not None:
                    self._gradients.watch(seen, result)
                else:
                    self._compare_runs(seen, outputs_of(result, (seen.tensors, {})))
            except Unperturbed as error:
                self._choice.table.get_counts(seen.base).skip(str(error))
            except (NotImplementedError, torch.cuda.OutOfMemoryError) as error:  # a kind of tensor, or a size, that nothing can be asked of
                self._choice.table.get_counts(seen.base).skip(f"cannot be compared ({type(error).__name__})")
        return result

    def end_step(self) -> None:
        """The step is over: judge what waits, count calls anew."""
        if self._gradients is not None:
            self._gradients.end_step()
        self._pending.resolve()
        if self._preheat is not None:
            self._preheat.end_step()
        self._choice.end_step()

    # ---- check ----

    def _compare_runs(self, seen: Seen, results: list[torch.Tensor]) -> None:
        if not any(kind(result) for result in results) and (self._mode != perturb.NO_CHANGE or not results):
            raise Unperturbed("no float result")
        if self._mode == perturb.TO_CPU:
            for position, agreed in agreement(seen, results):
                self._pending.record_judgement(_build_waiting(seen, results, position, (), ()), agreed.judgement())
            return
        change = Change(self._mode, find_autocast_type(seen.autocast, results))
        parts: dict[int, list[torch.Tensor]] = {}
        with closing(runs(seen, self._mode, results, change)) as again:
            for pairs in again:
                for position, old, new in pairs:
                    parts.setdefault(position, []).extend(measure_difference(old, new, self._mode, False))
        if not parts:
            raise Unperturbed("no float result")
        agrees = self._on_cpu(seen, results)
        for position, numbers in parts.items():
            self._pending.add(_build_waiting(seen, results, position, numbers, change.how_much, agrees.get(position)))

    def _on_cpu(self, seen: Seen, results: list[torch.Tensor]) -> dict[int, bool]:
        """For thresholds that are learnt: does the CPU agree?"""
        if self._preheat is None or not self._preheat.call(seen.base):
            return {}
        return {position: agreed.agrees for position, agreed in agreement(seen, results)}

    # ---- fix ----

    def _replace_result(self, seen: Seen, result: Any) -> Any:
        """The result of a more precise run, in the type and on the device of the original; autograd follows it."""
        if self._mode == perturb.IMPROVE and not low(seen.arguments, seen.autocast):
            raise Unperturbed("nothing in low precision")
        results = tensors_of(result)
        if not any(kind(tensor) for tensor in results):
            raise Unperturbed("no float result")
        storages = {tensor.untyped_storage()._cdata for tensor in seen.tensors}
        if any(tensor.untyped_storage()._cdata in storages for tensor in results):
            raise Unperturbed("gives memory of its input")
        to_cpu = self._mode == perturb.TO_CPU
        arguments = mapped(seen.arguments, on_cpu if to_cpu else raise_precision)
        args, kwargs = replace_devices(arguments, "cpu") if to_cpu else arguments
        try:
            with apart(seen.tensors, precision(self._mode, seen.autocast), training=True):
                made = tensors_of(seen.func(*args, **kwargs))
                if [tensor.shape for tensor in made] != [tensor.shape for tensor in results]:
                    raise Unperturbed("results of other shapes")
                fixed = iter([new.to(old.device, old.dtype) if kind(old) else old for new, old in zip(made, results)])
                replaced = mapped(result, lambda _: next(fixed))
        except Unperturbed:
            raise
        except Exception as error:
            raise_of_training(error)
            raise Unperturbed(f"no second run ({type(error).__name__})") from None
        self._choice.table.get_counts(seen.base).checked += 1
        return replaced


def _code(func: Any) -> Any:
    return getattr(func, "__name__", None) or type(func).__name__


def _build_waiting(
    seen: Seen, results: list[torch.Tensor], position: int, numbers: Any, change: Any, agrees: bool | None = None
) -> Waiting:
    tensor = results[position]
    place = str(position) if len(results) > 1 else ""
    return Waiting(seen.base, seen.name, str(tensor.dtype), kind(tensor) or "", str(tensor.shape), place, numbers, change, agrees)
