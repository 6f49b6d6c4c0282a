"""Functions replaced by wrappers under the names a program calls them by, and put back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, get_type_hints

from torch.jit import _builtins as _script

_OWN = frozenset(("torch", "torch_npu", "numpy", "random", "msprobe", "msprobe_engine", "msprobe_integrations", "builtins"))
"""Packages whose modules are not searched for early imports: they look functions up where they are replaced anyway."""

_ABSENT: Any = object()


class Rebinding:
    """Wrappers in place of functions.

    A function is replaced where it is defined (``torch.rand``) and, by `early_imports`, in every module that took it by
    ``from torch import rand`` before. `undo` puts back what still is as this object left it.
    """

    def __init__(self) -> None:
        self._changed: list[tuple[Any, str, Any, Any]] = []
        self._wrappers: dict[int, tuple[Any, Any]] = {}
        self._scripted: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._changed)

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Put ``wrap(function)`` in place of ``owner.name``; nothing happens where there is no such name.

        Args:
            owner: module or class.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        wrapper = wrap(original)
        before = vars(owner).get(name, _ABSENT)  # absent: inherited, or made by the owner's __getattr__
        setattr(owner, name, wrapper)
        self._changed.append((owner, name, before, wrapper))
        self._wrappers[id(original)] = (original, wrapper)
        self._for_script(original, wrapper)

    def early_imports(self) -> None:
        """Replace the same functions in modules that imported them by name."""
        wrappers = self._wrappers
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict) or str(names.get("__name__")).partition(".")[0] in _OWN:
                continue
            for name, value in list(names.items()):
                found = wrappers.get(id(value))
                if found is not None and found[0] is value:
                    names[name] = found[1]
                    self._changed.append((module, name, value, found[1]))

    def undo(self) -> None:
        """Put the functions back, the last one first. A name that somebody else has changed since stays as it is."""
        while self._changed:
            owner, name, before, wrapper = self._changed.pop()
            if vars(owner).get(name) is not wrapper:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._wrappers.clear()
        for key in self._scripted:
            _script._get_builtin_table().pop(key, None)
        self._scripted.clear()

    def _for_script(self, original: Any, wrapper: Any) -> None:
        """``torch.jit.script`` knows functions by identity; a wrapper that takes any argument could not be compiled."""
        operator = _script._find_builtin(original)
        if operator is not None:
            _script._register_builtin(wrapper, operator)
            self._scripted.append(id(wrapper))
        elif "__original_fn" not in vars(wrapper):
            compiled_as(wrapper, original)


def compiled_as(wrapper: Any, function: Any) -> Any:
    """Let ``torch.jit.script`` compile `function` where it meets `wrapper`; returns `wrapper`."""
    if function.__name__ != wrapper.__name__:  # the compiler wants one name for both
        hints, code = get_type_hints(function), function.__code__
        function = FunctionType(code, function.__globals__, wrapper.__name__, function.__defaults__, function.__closure__)
        function.__annotations__ = hints
    vars(wrapper).update({"__script_if_tracing_wrapper": True, "__original_fn": function})
    return wrapper
