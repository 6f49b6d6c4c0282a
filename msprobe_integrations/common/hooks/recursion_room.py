"""Room for the probe's calls below Python's limit of recursion, while its hooks are on.

A module with a forward hook, anybody's, costs one Python frame more per call (``inner`` of torch's ``_call_impl``), and what runs in a hook
needs frames below it. A model whose modules lie so deep in each other that the bare program needs all of the limit would die with the probe
by a `RecursionError`. The limit is therefore raised by what the hooks can cost at most, and is as before when they are off: each call of a
module takes three frames of the program at least (a Cell of MindSpore, too), and those of ours that the owner names. A program that sets
the limit itself meanwhile keeps what it has set.

What a program can see of it: `sys.getrecursionlimit`, and a recursion without an end ends some hundred frames later.
"""

from __future__ import annotations

import sys
import threading
import weakref

BELOW = 100
"""Frames for what runs inside of a hook."""
MOST = 2000
"""Never more than so many for calls within each other: a program that has set a large limit has thought of the size of its stack."""

_lock = threading.Lock()
_owners: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
"""Frames of ours in each call of a module."""
_limits: tuple[int, int] | None = None
"""The program's limit, and the one in its place."""


def raise_recursion_limit(owner: object, frames: int = 1) -> None:
    """Hooks of `owner` are on, with so many frames of ours in each call of a module."""
    global _limits
    with _lock:
        _owners[owner] = frames
        limit = sys.getrecursionlimit()
        before = _limits[0] if _limits is not None and limit == _limits[1] else limit
        wide = before + min(before // 3 * max(_owners.values()), MOST) + BELOW
        if wide > limit:
            _limits = before, wide
            sys.setrecursionlimit(wide)


def narrow(owner: object) -> None:
    global _limits
    with _lock:
        _owners.pop(owner, None)
        if _owners or _limits is None:
            return
        if sys.getrecursionlimit() == _limits[1]:
            try:
                sys.setrecursionlimit(_limits[0])
            except RecursionError:  # called from deeper than that: another time
                return
        _limits = None
