"""Looks before and after methods of single objects, where a framework has no hooks of its own; no class is patched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from msprobe_engine.guard import Faults


class MethodHooks:
    """Puts a function around methods of objects and takes them off again. What is put on last is on the outside.

    Args:
        faults: of the probe. A look that raises switches `part` off: from then on nothing looks any more, and the methods go on.
        part: what is looked at.
    """

    def __init__(self, faults: Faults, part: str) -> None:
        self._faults = faults
        self._part = part
        self._undo: list[Callable[[], None]] = []

    def guarded(self, look: Callable[..., None]) -> Callable[..., None]:
        """`look` for a hook that a framework calls: without autograd, and nothing that it raises comes out of it."""

        def call(*args: Any, **kwargs: Any) -> None:
            if self._faults.enabled(self._part):
                with self._faults.guard(self._part), torch.no_grad():
                    look(*args, **kwargs)

        return call

    def before(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        """Call `look` with the method's arguments before each call of ``owner.name``."""
        original, seen = getattr(owner, name), self.guarded(look)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            seen(*args, **kwargs)
            return original(*args, **kwargs)

        self._put(owner, name, call)

    def after(self, owner: Any, name: str, look: Callable[[Any], None]) -> None:
        """Call `look` with the result after each call of ``owner.name`` that returned."""
        original, seen = getattr(owner, name), self.guarded(look)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            seen(result)
            return result

        self._put(owner, name, call)

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Something else that is to be taken off with the rest (the ``remove`` of a hook's handle)."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Take everything off. A method that somebody else has wrapped since stays as it is: the rest of the chain would be lost."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def __bool__(self) -> bool:
        return bool(self._undo)

    def _put(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, call)
        self._undo.append(functools.partial(_restore, owner, name, call, before))


def _restore(owner: Any, name: str, call: Callable[..., Any], before: Any) -> None:
    """Put back what the object had: nothing (the class's method shows again) or an attribute of its own."""
    if vars(owner).get(name) is not call:
        return
    if before is None:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
