"""Functions of a framework that several captures look through, put on and taken off in any order.

Two wrappers of one function that are taken off in the order they were put on would leave the first one's wrapper inside the second, or
bring it back when it is long over. So a name gets one function of ours, a door, and captures come and go behind it. An interrupt
between any two lines leaves a door that still works.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

Handler = Callable[..., Any]
"""Called with the next function in line and the arguments; whatever it returns is the result."""


class Door:
    """One replaced function.

    Args:
        owner, name: where it is: a module or a class.
        kind: how a class keeps it (``classmethod``), None for a plain function.
        inherited: what is called where `owner` has no such name of its own; None: it has.
    """

    def __init__(self, owner: Any, name: str, kind: Any = None, inherited: Handler | None = None) -> None:
        self._owner = owner
        self._name = name
        self._inherited = inherited
        self._original: Any = inherited
        self._handlers: tuple[Handler, ...] = ()
        self._lock = threading.Lock()
        self._placed = False

        def door(*args: Any, **kwargs: Any) -> Any:
            following = self._original
            for handler in self._handlers:  # each costs one Python frame: modules lie deep in each other
                following = functools.partial(handler, following)
            return following(*args, **kwargs)

        self._door = door
        self._function = door if kind is None else kind(door)

    def add(self, handler: Handler) -> None:
        """`handler` sees all calls from now on, before those that came earlier."""
        with self._lock:
            if handler not in self._handlers:
                self._handlers = (*self._handlers, handler)
            now = vars(self._owner).get(self._name)
            if now is self._function or self._placed:  # the latter: somebody's wrapper around ours leads here
                return
            if self._inherited is None:
                self._original = now
                self._door.__wrapped__ = now  # type: ignore[attr-defined]  # MindSpore's graph compiler looks through what has this
            setattr(self._owner, self._name, self._function)
            self._placed = True

    def discard(self, handler: Handler) -> None:
        """`handler` sees no more calls; without any the function is what it was, unless somebody has put a wrapper around ours."""
        with self._lock:
            self._handlers = tuple(h for h in self._handlers if h != handler)
            if self._handlers or vars(self._owner).get(self._name) is not self._function:
                return
            if self._inherited is None:
                setattr(self._owner, self._name, self._original)
            else:
                delattr(self._owner, self._name)
            self._placed = False


_shared: dict[tuple[int, str], Door] = {}


def shared_door(owner: Any, name: str) -> Door:
    """The one door of a function of a module or class that lives as long as the process."""
    return _shared.setdefault((id(owner), name), Door(owner, name))


class Doors:
    """Handlers behind shared doors that come together and go together."""

    def __init__(self) -> None:
        self._handlers: list[tuple[Door, Handler]] = []

    def __bool__(self) -> bool:
        return bool(self._handlers)

    def add(self, owner: Any, name: str, handler: Handler) -> None:
        """`handler` looks through this function from now on."""
        door = shared_door(owner, name)
        self._handlers.append((door, handler))
        door.add(handler)

    def close(self) -> None:
        """Take all handlers away."""
        while self._handlers:
            door, handler = self._handlers.pop()
            door.discard(handler)
