"""Keeps the interpreter's garbage collector from running again and again inside a captured step, or while a file is read."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLD = 100_000
"""Container objects that may be made before the young generation is looked at; a captured step of 700 calls makes about 12,000."""


class StepCollection:
    """A captured step makes thousands of small containers, most of which die at its end by reference counting. With the usual
    threshold (700) the collector would walk them a dozen times per step and, since they survive that long, take them for a reason to
    walk the whole heap, which costs 100 ms and more under torch. Inside a step the threshold is raised; at its end it is what it was.
    Nothing is kept alive that is not kept anyway, and a collector that the user has switched off or tuned higher is left alone.
    """

    def __init__(self) -> None:
        self._before: tuple[int, int, int] | None = None

    def raise_threshold(self) -> None:
        """A step begins (or goes on)."""
        now = gc.get_threshold()
        if self._before is None and gc.isenabled() and 0 < now[0] < THRESHOLD:
            self._before = now
            gc.set_threshold(THRESHOLD, *now[1:])

    def restore_threshold(self) -> None:
        """The step is over. Thresholds that somebody else has set meanwhile stay."""
        before, self._before = self._before, None
        if before is not None and gc.get_threshold() == (THRESHOLD, *before[1:]):
            gc.set_threshold(*before)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Nothing read from a file is garbage: the collector would only walk through it again and again, for half of the time."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()
