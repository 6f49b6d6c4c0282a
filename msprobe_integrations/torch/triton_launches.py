"""Launches of Triton kernels, whose arguments they may write to.

A kernel gets pointers: no version counter moves and no operator of torch is called. Every launch from Python goes through ``run`` of the
class that ``@triton.jit`` makes, autotuned kernels too; what torch.compile launches does not, and is not seen by records either. Triton
is never imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from msprobe_integrations.autoload.imports import after_import, forget
from msprobe_integrations.common.doors import Doors

_CLASSES = {"triton.runtime.jit": "JITFunction", "triton.runtime.interpreter": "InterpretedFunction"}
_OWN = "msprobe_integrations."


class TritonLaunches:
    """Tells of the arguments of each launch while it is installed.

    Args:
        written: called with the arguments after each launch.
    """

    def __init__(self, written: Callable[[Any], None]) -> None:
        self._written = written
        self._doors = Doors()

    def install(self) -> None:
        """Begin to see launches; where Triton has not been imported yet, as soon as it is."""
        for name in _CLASSES:
            after_import(name, self._join)

    def remove(self) -> None:
        """See no more launches."""
        for name in _CLASSES:
            forget(name, self._join)
        self._doors.close()

    def _join(self, module: ModuleType) -> None:
        kind = getattr(module, _CLASSES[module.__name__], None)
        if kind is not None and "run" in vars(kind):
            self._doors.add(kind, "run", self._launched)

    def _launched(self, run: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(kernel, *args, **kwargs)
        finally:
            if not str(getattr(getattr(kernel, "fn", None), "__module__", "")).startswith(_OWN):  # ours write rows only
                given = [*args, *kwargs.values()]
                # descriptors and typed views of Triton hold the tensor as `base`
                self._written([*given, *(value.base for value in given if hasattr(value, "base"))])
