"""`PrecisionChecker`: is compiled code as precise as the same code uncompiled, module by module?"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msprobe_engine.accuracy.compile_report import CompareResult, ModuleDiff, text, write_csv
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.guard import Faults, raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_integrations.torch.op_tools.compile_check.graphs import Backend, Graphs
from msprobe_integrations.torch.op_tools.compile_check.passes import Pass, compare, exact_passes, one_pass
from msprobe_integrations.torch.op_tools.compile_check.runs import device_of, same_buffers, streams
from msprobe_integrations.torch.op_tools.compile_check.watch import Watched

_log = get_logger()
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NAN = float("nan")


class PrecisionChecker:
    """Compares compiled modules with themselves uncompiled.

    Say what is compiled with `wrap`, `wrap_by_policy` or `wrap_all_children` (nothing said: the whole model), then either

    * `install(model)`, one step of the training with its backward, `collect(loss)`: the training runs compiled; every call is made again,
      uncompiled and in float64, when it is collected; or
    * `compare(fn, model)` with a function that runs the model and gives its loss. With ``single_pass=False`` whole passes are compared,
      so that what goes wrong in one module is seen in those behind.

    Neither changes weights, gradients, buffers or random streams beyond what the compiled step itself does.

    Args:
        backend: ``"aot_eager"``, ``"inductor"``, ``"eager"``, any other that `torch.compile` knows, or a function.
        threshold: largest difference, relative to the largest value of a tensor, that passes; None: precision decides (`verdict`).
        dump_graphs: save the text of every graph.
        graph_dir: where.
        cast_dtype: run under autocast to this type.
        capture_input: list inputs of modules, too.
        single_pass: of `compare`.
        graphs: also hold every captured graph against itself uncompiled.
        reference: run in float64; without it differences are judged by fixed limits.
        strict: raise where keeping a call fails, in place of leaving the module out.
    """

    def __init__(
        self,
        backend: Backend = "aot_eager",
        threshold: float | None = None,
        dump_graphs: bool = False,
        graph_dir: str | os.PathLike[str] = "./graph_dump",
        cast_dtype: torch.dtype | None = None,
        capture_input: bool = True,
        single_pass: bool = True,
        *,
        graphs: bool = True,
        reference: bool = True,
        strict: bool = False,
    ) -> None:
        if threshold is not None and not (isinstance(threshold, (int, float)) and threshold >= 0):
            raise UsageError(f"PrecisionChecker: threshold={threshold!r}; allowed is a number from 0, or None")
        if cast_dtype is not None and not (isinstance(cast_dtype, torch.dtype) and cast_dtype.is_floating_point):
            raise UsageError(f"PrecisionChecker: cast_dtype={cast_dtype!r}; allowed is a floating type, torch.bfloat16")
        if not callable(backend) and backend not in torch._dynamo.list_backends(exclude_tags=()):
            known = ", ".join(torch._dynamo.list_backends())
            raise UsageError(f"PrecisionChecker: backend={backend!r} is not known; allowed: {known}, or a function")
        self.backend, self.threshold, self.cast_dtype = backend, threshold, cast_dtype
        self.dump_graphs, self.graph_dir = dump_graphs, Path(os.fspath(graph_dir))
        self.capture_input, self.single_pass = capture_input, single_pass
        self._graphs_checked, self._reference, self._strict = graphs, reference, strict
        self._wrapped: list[nn.Module] = []
        self._ignored: list[nn.Module] = []
        self._model: nn.Module | None = None
        self._watched: list[Watched] = []
        self._graphs: Graphs | None = None
        self._loss = NAN

    # what is compiled

    def wrap(self, module: nn.Module, name: str | None = None) -> nn.Module:  # noqa: ARG002 names come from the model
        """Compile this module. `name` is accepted as the existing tool takes it; in results modules have their names in the model."""
        self._wrapped.append(module)
        return module

    def wrap_by_policy(self, model: nn.Module, module_types: Sequence[type[nn.Module]]) -> nn.Module:
        """Compile every module of these classes; of modules inside each other the outermost."""
        found = [module for module in model.modules() if isinstance(module, tuple(module_types))]
        if not found:
            _log.warning("PrecisionChecker: no module of %s in the model", ", ".join(kind.__name__ for kind in module_types))
        self._wrapped += found
        return model

    def wrap_all_children(self, model: nn.Module, depth: int = 1) -> nn.Module:
        """Compile the modules below the model, `depth` levels further down where they have children: with 0 its direct children. Lists and
        sequences of modules are no level."""

        def collect_children(module: nn.Module, left: int) -> None:
            for child in module.children():
                if isinstance(child, _CONTAINERS):
                    collect_children(child, left)
                elif left <= 0 or next(child.children(), None) is None:
                    self._wrapped.append(child)
                else:
                    collect_children(child, left - 1)

        collect_children(model, depth)
        return model

    def ignore(self, module: nn.Module) -> nn.Module:
        """Neither compile nor compare this module."""
        self._ignored.append(module)
        return module

    def ignore_by_policy(self, model: nn.Module, module_types: Sequence[type[nn.Module]]) -> nn.Module:
        """Neither compile nor compare modules of these classes."""
        self._ignored += [module for module in model.modules() if isinstance(module, tuple(module_types))]
        return model

    # one step of a training

    def install(self, model: nn.Module) -> nn.Module:
        """Compile the modules where they are; they keep their names and parameters. Returns the model.

        Raises:
            UsageError: it is installed already, or what was wrapped is no part of the model.
        """
        if self._model is not None:
            raise UsageError("PrecisionChecker: install() a second time; collect() the first result, or remove()")
        targets = self._targets(model)
        torch._dynamo.reset()
        faults = Faults(self._strict)
        self._graphs = Graphs(self.backend, self.graph_dir if self.dump_graphs else None, self._graphs_checked, faults)
        self._watched = [Watched(name, module, self._graphs, self.cast_dtype, faults) for name, module in targets.items()]
        self._model, self._loss = model, NAN
        return model

    def record_loss(self, loss: torch.Tensor | float) -> None:
        """The loss of the step, for the report."""
        self._loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def collect(self, loss: torch.Tensor | float | None = None) -> CompareResult:
        """Compare what ran since `install`, and take everything off.

        Call it behind the backward pass; before the optimizer changes the parameters where outputs are to be those of the step.

        Raises:
            UsageError: nothing is installed.
        """
        if self._model is None or self._graphs is None:
            raise UsageError("PrecisionChecker: collect() without install(model)")
        if loss is not None:
            self.record_loss(loss)
        diffs: list[ModuleDiff] = []
        for watched in self._watched:
            watched.keeps = False
        checked = dict(self._graphs.found)  # before the calls are made again
        for watched in self._watched:
            compared = watched.compare(self.threshold, self.capture_input, self._reference)
            diffs += compared or [ModuleDiff(watched.name, note="SKIP: was not called")]
        diffs += self._notes(self._model)
        diffs += [ModuleDiff(name, graph_output=compared) for name, compared in checked.items()]
        self.remove()
        return CompareResult(NAN, self._loss, diffs, self.cast_dtype, None, _name(self.backend))

    def remove(self) -> None:
        """Take everything off without a result."""
        for watched in self._watched:
            watched.remove()
        self._watched, self._model, self._graphs = [], None, None

    # whole passes

    def compare(self, fn: Callable[[nn.Module], torch.Tensor], model: nn.Module) -> CompareResult:
        """Run ``fn(model)`` compiled and compare. The backward of its loss is run where `fn` has not done so.

        Raises:
            UsageError: `fn` gives no loss.
        """
        state = streams()
        if self.single_pass:
            self.install(model)
            try:
                ran = one_pass(fn, model, {}, state)
                return self.collect(ran.loss)
            finally:
                self.remove()
        return self._two_passes(fn, model, state)

    def compare_backends(
        self, fn: Callable[[nn.Module], torch.Tensor], model: nn.Module, backends: Sequence[Backend] = ("eager", "aot_eager", "inductor")
    ) -> dict[str, CompareResult]:
        """`compare` with one backend after the other: the first that fails says in which layer of the compiler it goes wrong. ``eager``
        is dynamo alone, ``aot_eager`` adds autograd traced ahead of time, ``inductor`` generates code."""
        before, results = self.backend, {}
        try:
            for backend in backends:
                self.backend = backend
                results[_name(backend)] = self.compare(fn, model)
        finally:
            self.backend = before
        return results

    def _two_passes(self, fn: Callable[[nn.Module], torch.Tensor], model: nn.Module, state: Any) -> CompareResult:
        targets = self._targets(model)
        ignored = {id(part) for module in self._ignored for part in module.modules()}
        names = {module: name for name, module in model.named_modules() if id(module) not in ignored}
        outside = {module: name for module, name in names.items() if name not in targets and not _inside(name, targets)}
        unit = self._unit(model)
        truth: Pass | None = None
        changed: list[Pass] = []
        problem = ""
        cast = None if self.cast_dtype is None else self._autocast(model)
        eager = one_pass(fn, model, names, state, cast, list(targets.values()))
        if self._reference:
            try:
                truth, changed = exact_passes(fn, model, names, state, unit, list(targets))
            except Exception as error:  # the program makes float32 tensors of its own, or an operation has no float64
                raise_of_training(error)
                problem = f"SKIP: no float64 run: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        self.install(model)
        try:
            for watched in self._watched:
                watched.keeps = False
            with same_buffers(model):
                one_pass(fn, model, {}, state, cast)  # what is compiled lazily is compiled before anything is looked at
            compiled = one_pass(fn, model, outside, state, cast, compiled=self._watched)
            graphs = dict(self._graphs.found) if self._graphs is not None else {}
        finally:
            self.remove()
        kind = "" if unit is None else str(unit)
        diffs, loss = compare(eager, compiled, truth, changed, threshold=self.threshold, unit=kind, inputs=self.capture_input)
        diffs += self._notes(model)
        diffs += [ModuleDiff("float64", note=problem)] if problem else []
        diffs += [ModuleDiff(name, graph_output=graph_diffs) for name, graph_diffs in graphs.items()]
        return CompareResult(float(eager.loss), float(compiled.loss), diffs, self.cast_dtype, loss, _name(self.backend))

    def _autocast(self, model: nn.Module) -> Callable[[], Any]:
        return lambda: torch.autocast(device_of(model, ()), dtype=self.cast_dtype)

    def _unit(self, model: nn.Module) -> torch.dtype | None:
        kinds = {p.dtype for p in model.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1}
        kinds |= {self.cast_dtype} if self.cast_dtype is not None else set()
        return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=None)

    def _targets(self, model: nn.Module) -> dict[str, nn.Module]:
        """What is compiled, by name in the model: of wrapped modules inside each other the outermost."""
        wrapped, ignored = {id(module) for module in self._wrapped}, {id(module) for module in self._ignored}
        targets: dict[str, nn.Module] = {}
        skipped: list[str] = []
        for name, module in model.named_modules():
            if _inside(name, targets) or any(name == s or name.startswith(f"{s}.") for s in skipped):
                continue
            if id(module) in ignored:
                skipped.append(name)
            elif id(module) in wrapped or not wrapped:
                targets[name] = module
        if not targets:
            raise UsageError("PrecisionChecker: none of the wrapped modules is a part of this model, or all are ignored")
        return targets

    def _notes(self, model: nn.Module) -> list[ModuleDiff]:
        ignored = {id(module) for module in self._ignored}
        return [ModuleDiff(name, note="IGNORED") for name, module in model.named_modules() if id(module) in ignored]

    # results

    def report(self, result: CompareResult, csv_path: str | os.PathLike[str] | None = None) -> None:
        """Print the result, and write it as CSV.

        Raises:
            OSError: the file cannot be written.
        """
        print(text(result, self.capture_input))
        if csv_path is not None:
            write_csv(result, Path(os.fspath(csv_path)), self.capture_input)
            _log.info("PrecisionChecker: %s", csv_path)


def first_failing(results: Mapping[str, CompareResult]) -> str:
    """The backend of `PrecisionChecker.compare_backends` where it begins to fail; empty where none does."""
    return next((name for name, result in results.items() if not result.all_pass), "")


def _inside(name: str, outer: Mapping[str, Any]) -> bool:
    return any(name != other and (not other or name.startswith(f"{other}.")) for other in outer)


def _name(backend: Backend) -> str:
    return backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
