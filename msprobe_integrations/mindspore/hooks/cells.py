"""Calls of Cells as the monitor sees them: where Python calls one, only in steps that are due, and never inside of compiled code.

As in `cells`, hooks of MindSpore are not used: what they give back replaces the output, and one that is met while a graph is compiled
becomes a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msprobe_integrations.common.hooks import recursion_room
from msprobe_integrations.common.monitor.module_monitor import Post, Pre
from msprobe_integrations.common.monitor.targets import Named
from msprobe_integrations.patching import FunctionPatches

FRAMES = 4
"""Of ours in each call of a Cell: the patch, and what looks through it: the monitor, and the dump (two where gradients come from
operators around the call)."""


class _Place(NamedTuple):
    cell: Any
    entrance: type
    pre: Pre | None
    post: Post | None
    owner: Any


class CellHooks:
    """What is to be called before and after Cells. `install` and `remove` as often as one likes; neither `pre` nor `post` may raise
    anything but what is the training's own."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._at: dict[int, list[_Place]] = {}
        self._patches = FunctionPatches()

    def add(self, named: Named, pre: Pre | None, post: Post | None, owner: Any = None) -> None:
        """Call `pre` before and `post` after every call of the Cell, until `drop(owner)`."""
        entrance = next(c for c in type(named.hooked).__mro__ if "__call__" in vars(c))
        place = _Place(named.hooked, entrance, pre, post, owner)
        self._places.append(place)
        self._at.setdefault(id(named.hooked), []).append(place)

    def drop(self, owner: Any) -> None:
        self._places = [place for place in self._places if place.owner is not owner]
        self._at = {}
        for place in self._places:
            self._at.setdefault(id(place.cell), []).append(place)

    def clear(self) -> None:
        self.remove()
        self._places.clear()
        self._at.clear()

    def install(self) -> None:
        """See calls from now on."""
        if not self._patches and self._places:
            recursion_room.raise_recursion_limit(self, FRAMES)
            for entrance in dict.fromkeys(place.entrance for place in self._places):
                self._patches.add(entrance, "__call__", self._handler(entrance))

    def remove(self) -> None:
        """See no more calls; nothing is left behind."""
        if self._patches:
            self._patches.close()
            recursion_room.narrow(self)

    def _handler(self, entrance: type) -> Callable[..., Any]:
        def call_with_hooks(following: Callable[..., Any], cell: Any, *args: Any, **kwargs: Any) -> Any:
            places = self._at.get(id(cell))
            if places is None or places[0].entrance is not entrance or places[0].cell is not cell:
                return following(cell, *args, **kwargs)
            for place in places:
                if place.pre is not None:
                    place.pre(cell, args, kwargs)
            result = following(cell, *args, **kwargs)
            for place in places:
                if place.post is not None:
                    place.post(cell, args, kwargs, result)
            return result

        return call_with_hooks
