"""Looks before and after methods of single objects, where a framework has no hooks of its own; no class is patched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from msprobe_engine.core.guard import Faults
from msprobe_integrations.patching import Replacement

_LOOKS = "_msprobe_looks"
_Look = Callable[..., None]


class MethodHooks:
    """Puts a function around methods of objects and takes them off again.

    A method is wrapped once, however many look: who wraps it later keeps his place in the chain when looks come and go.

    Args:
        faults: of the probe. A look that raises switches `part` off: from then on nothing looks any more, and the methods go on.
    """

    def __init__(self, faults: Faults, part: str) -> None:
        self._faults = faults
        self._part = part
        self._undo: list[Callable[[], None]] = []

    def guard_hook(self, look: _Look) -> _Look:
        """`look` for a hook that a framework calls: without autograd, and nothing that it raises comes out of it."""

        def call(*args: Any, **kwargs: Any) -> None:
            if self._faults.is_enabled(self._part):
                with self._faults.guard(self._part), torch.no_grad():
                    look(*args, **kwargs)

        return call

    def before(self, owner: Any, name: str, look: _Look) -> None:
        """Call `look` with the method's arguments before each call of ``owner.name``."""
        self._add(owner, name, 0, self.guard_hook(look))

    def after(self, owner: Any, name: str, look: _Look) -> None:
        """Call `look` with the result after each call of ``owner.name`` that returned."""
        self._add(owner, name, 1, self.guard_hook(look))

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Something else that is to be taken off with the rest (the ``remove`` of a hook's handle)."""
        self._undo.append(undo)

    def undo(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def __bool__(self) -> bool:
        return bool(self._undo)

    def _add(self, owner: Any, name: str, when: int, look: _Look) -> None:
        call = _ours(getattr(owner, name)) or _wrap(owner, name)
        looks: list[_Look] = getattr(call, _LOOKS)[when]
        looks.append(look)
        self._undo.append(functools.partial(_remove, call, looks, look))


def _wrap(owner: Any, name: str) -> Any:
    original = getattr(owner, name)
    before: list[_Look] = []
    after: list[_Look] = []

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        for look in tuple(before):
            look(*args, **kwargs)
        result = original(*args, **kwargs)
        for look in tuple(after):
            look(result)
        return result

    setattr(call, _LOOKS, (before, after, Replacement(owner, name, call)))
    return call


def _ours(function: Any) -> Any:
    """Our wrapper in the chain of `__wrapped__`, or None."""
    while function is not None and not hasattr(function, _LOOKS):
        function = getattr(function, "__wrapped__", None)
    return function


def _remove(call: Any, looks: list[_Look], look: _Look) -> None:
    """Take one look off; with the last one the object gets back what it had: the class's method, or an attribute of its own. A wrapper
    that somebody else has wrapped since stays and only calls on."""
    looks.remove(look)
    before, after, replacement = getattr(call, _LOOKS)
    if not before and not after:
        replacement.undo()
