"""Where the free benchmark sees calls of torch: where a dump at level L1 sees them, under the same names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

from msprobe_engine.core.guard import Faults
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.writer import Writer
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.api import ApiCapture
from msprobe_integrations.torch.capture.recorder import Recorder
from msprobe_integrations.torch.hooks.frames import PLAIN, kind_of
from msprobe_integrations.torch.hooks.functions import Rebinding
from msprobe_integrations.torch.op_tools.free_benchmark.checker import Checker
from msprobe_integrations.torch.op_tools.free_benchmark.second import Seen

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
        super().__init__(Recorder(pipeline, stacks=False, data_mode=("forward",)), self._wanted)
        self._checker = checker
        self._made: tuple[Any, Any, dict[str, Any]] | None = None
        self._instead: list[Any] = []
        self._thread = -1
        self._replaced = Rebinding()
        self.on = False

    def _wanted(self) -> bool:
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
            return self.take(function, prefix, name, args, kwargs) if self.sees() else function(*args, **kwargs)

        return call

    def take(self, function: Callable[..., Any], prefix: str, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
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

    def begin(self, prefix: str, api: str, *_: Any) -> Any:
        made, self._made = self._made, None
        if made is None:
            return None
        return self._checker.before(prefix, api, *made)

    def end(self, call: Any, result: Any, failed: bool = False) -> None:
        if isinstance(call, Seen) and not failed:
            instead = self._checker.after(call, result)
            if instead is not result:
                self._instead.append(instead)
