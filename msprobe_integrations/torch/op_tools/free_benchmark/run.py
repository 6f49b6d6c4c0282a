"""Task free_benchmark with torch: calls are taken where a dump at level L1 sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

from msprobe_engine.accuracy.free_benchmark.preheat import Preheat
from msprobe_engine.accuracy.free_benchmark.table import FreeBenchmarkTable
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.formats.dump.layout import rank_directory
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.writer import Writer
from msprobe_integrations.common.capture.filters import record_filter
from msprobe_integrations.common.op_tools.free_benchmark.choice import Choice
from msprobe_integrations.common.op_tools.free_benchmark.run import FreeBenchmarkRun
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.api import ApiCapture
from msprobe_integrations.torch.capture.recorder import Recorder
from msprobe_integrations.torch.hooks.frames import PLAIN, kind_of
from msprobe_integrations.torch.hooks.functions import Rebinding
from msprobe_integrations.torch.hooks.graph_tasks import current_graph_task
from msprobe_integrations.torch.op_tools.free_benchmark.checker import Checker
from msprobe_integrations.torch.op_tools.free_benchmark.second import Seen


class FreeBenchmark(FreeBenchmarkRun):
    """See `FreeBenchmarkRun`. Rows of a step are in ``step{N}/rank{R}/free_benchmark.csv``."""

    def __init__(self, dump: DumpSettings, root: Path, faults: Faults) -> None:
        super().__init__(dump, root, faults, FreeBenchmarkTable(root, "pert_mode"))
        self._choice = Choice(self.settings, record_filter(self.dump, current_graph_task), self.table)
        preheat = Preheat(self.settings.preheat_step, self.settings.max_sample) if self.settings.if_preheat else None
        self._checker = Checker(self._choice, faults, dump.memory_budget_mb << 20, preheat)
        self.api = ApiMode(self._checker, faults)
        self._seen = False

    def take_calls(self, _model: Any, step: int, rank: int | None) -> None:
        self._choice.step, self._choice.rank = step, rank
        self._seen = True
        self.api.open()

    def leave_calls(self) -> None:
        self.api.close()

    def finish(self) -> None:
        if self._seen:
            self._seen = False
            self._checker.end_step()

    def place(self) -> str:
        return f"step{self._choice.step}/{rank_directory(self._choice.rank)}"


_REPLACEABLE: tuple[tuple[Any, str, frozenset[str]], ...] = (
    (functional, "Functional", frozenset(name for name in dir(functional) if not name.startswith("_"))),
    (torch, "Torch", frozenset(torch.__all__)),
)
"""Names that a program may replace by functions of its own."""


class ApiMode(ApiCapture):
    """The capture of a checker; no records are made."""

    _caller = 2

    def __init__(self, checker: Checker, faults: Faults) -> None:
        pipeline = Pipeline(TorchBackend(), [], Writer([], faults), faults)
        super().__init__(Recorder(pipeline, stacks=False, data_mode=("forward",)), self._is_active)
        self._checker = checker
        self._made: tuple[Any, Any, dict[str, Any]] | None = None
        self._instead: list[Any] = []
        self._thread = -1
        self._replaced = Rebinding()
        self.on = False

    def _is_active(self) -> bool:
        return self.on and threading.get_ident() == self._thread

    def open(self) -> None:
        """See calls of this thread."""
        self._thread = threading.get_ident()
        self.on = True
        self.install()
        for owner, prefix, names in _REPLACEABLE:
            for name, value in list(vars(owner).items()):
                if isinstance(value, FunctionType) and kind_of(value.__code__) == PLAIN and name in names:
                    self._replaced.wrap(owner, name, partial(self._of_program, prefix, name))

    def close(self) -> None:
        """See no more."""
        self.on = False
        self._replaced.undo()
        self.remove()

    def _of_program(self, prefix: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of torch that the program has replaced by its own is one call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.make_call(function, prefix, name, args, kwargs) if self.sees() else function(*args, **kwargs)

        return call

    def make_call(self, function: Callable[..., Any], prefix: str, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call that is a record as a whole; what it calls inside is not looked at."""
        seen = self._checker.before(prefix, name, function, args, kwargs)
        with self.aside():
            result = function(*args, **kwargs)
            return result if seen is None else self._checker.after(seen, result)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._made = func, args, kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        self._made = None
        return self._instead.pop() if self._instead else result

    def _apply(self, apply: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        self._made = partial(apply, cls), args, kwargs
        result = super()._apply(apply, cls, *args, **kwargs)
        self._made = None
        return self._instead.pop() if self._instead else result

    def begin_call(self, prefix: str, api: str, *_: Any) -> Any:
        made, self._made = self._made, None
        if made is None:
            return None
        return self._checker.before(prefix, api, *made)

    def end_call(self, call: Any, result: Any, failed: bool = False) -> None:
        if isinstance(call, Seen) and not failed:
            instead = self._checker.after(call, result)
            if instead is not result:
                self._instead.append(instead)
