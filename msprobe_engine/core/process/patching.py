"""Functions replaced by wrappers under the names a program calls them by, and put back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_ABSENT: Any = object()
_OWN = ("msprobe", "msprobe_engine", "msprobe_integrations")


class Replaced:
    """Wrappers in place of functions.

    A function is replaced where it is defined (``torch.rand``) and, by `early_imports`, in every module that took it by
    ``from torch import rand`` before. `undo` puts back what still is as this object left it.

    Args:
        packages: root modules that look functions up where they are replaced anyway; their modules are not searched.
    """

    def __init__(self, *packages: str) -> None:
        self._packages = {*packages, *_OWN}
        self._changed: list[tuple[Any, str, Any, Any]] = []
        self._wrappers: dict[int, tuple[Any, Any]] = {}

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
        self.replaced(original, wrapper)

    def replaced(self, original: Any, wrapper: Any) -> None:
        """`wrapper` stands in place of `original` now; for classes that have more to do then."""

    def early_imports(self) -> None:
        """Replace the same functions in modules that imported them by name."""
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict) or str(names.get("__name__")).partition(".")[0] in self._packages:
                continue
            for name, value in list(names.items()):
                found = self._wrappers.get(id(value))
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
