"""Launches of Triton kernels, whose arguments they may write to.

A kernel gets pointers: no version counter moves and no operator of torch is called. Every launch from Python goes through ``run`` of the
class that ``@triton.jit`` makes, and of those around it that choose a configuration; what torch.compile launches does not, and is not seen
by records either. Triton is never imported here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from msprobe_integrations.autoload.imports import after_import, forget
from msprobe_integrations.patching import FunctionPatches

_CLASSES = {
    "triton.runtime.jit": "JITFunction",
    "triton.runtime.interpreter": "InterpretedFunction",
    "triton.runtime.autotuner": "Autotuner Heuristics",
}
_OWN = "msprobe_integrations."
Launched = Callable[[str, Callable[[], Any], Sequence[Any], Mapping[str, Any]], Any]


def tensors_given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments of a launch that may be tensors; of Triton's descriptors and typed views the tensor that they hold."""
    given = [*args, *kwargs.values()]
    return [*given, *(value.base for value in given if hasattr(value, "base"))]


class TritonLaunches:
    """Tells of each launch while it is installed.

    Args:
        launched: called in place of each launch with the kernel's name, the launch itself, and its arguments; what it returns is the
            result. Launches inside of it, those of an autotuner, are not told.
    """

    def __init__(self, launched: Launched) -> None:
        self._launched = launched
        self._patches = FunctionPatches()
        self._inside = threading.local()

    def install(self) -> None:
        """Begin to see launches; where Triton has not been imported yet, as soon as it is."""
        for name in _CLASSES:
            after_import(name, self._join)

    def remove(self) -> None:
        """See no more launches."""
        for name in _CLASSES:
            forget(name, self._join)
        self._patches.close()

    def _join(self, module: ModuleType) -> None:
        for name in _CLASSES[module.__name__].split():
            kind = getattr(module, name, None)
            if kind is not None and "run" in vars(kind):
                self._patches.add(kind, "run", self._run)

    def _run(self, run: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
        function = _function(kernel)
        ours = str(getattr(function, "__module__", "")).startswith(_OWN)  # ours write rows only
        if ours or kwargs.get("warmup") or getattr(self._inside, "now", False):
            return run(kernel, *args, **kwargs)
        self._inside.now = True
        try:
            name = str(getattr(function, "__name__", type(kernel).__name__))
            return self._launched(name, lambda: run(kernel, *args, **kwargs), args, kwargs)
        finally:
            self._inside.now = False


def _function(kernel: Any) -> Any:
    for _ in range(8):
        inner = getattr(kernel, "fn", None)
        if inner is None:
            break
        kernel = inner
    return kernel
