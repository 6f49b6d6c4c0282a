"""How long the end of a training may wait for the other ranks.

A training that ends of itself does so on all ranks, and their rows arrive. One that raises, on one rank or in the midst of a step on all
of them, leaves the others held in a collective of the training that this rank no longer joins: they can only come when this process has
ended, so there is little to wait for, and an interrupt has to work at once.
"""

from __future__ import annotations

import math
import sys
import time

from msprobe_engine.probe.pipeline import CLOSE_PATIENCE
from msprobe_integrations.common.shutdown import signal_shutdown

CUT_PATIENCE = 0.5
"""Seconds, in all, for the other ranks after the training has raised: for those that were interrupted a moment later."""
LEAST = 0.02


def has_raised() -> bool:
    """Is an exception on its way through the training, or has one ended it?"""
    return sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None


class ShutdownDeadline:
    """One per probe."""

    def __init__(self) -> None:
        self._until = math.inf

    def cut(self) -> None:
        """The training has raised: from now on the rest is little."""
        self._until = min(self._until, time.monotonic() + CUT_PATIENCE)

    def limit(self) -> None:
        """The probe is being closed: all that is waited for from now on has `CLOSE_PATIENCE` together."""
        self._until = min(self._until, time.monotonic() + CLOSE_PATIENCE)

    def renew(self) -> None:
        """The training goes on."""
        self._until = math.inf

    def left(self) -> float:
        """Seconds that the other ranks may be waited for now, at least `LEAST`; looks whether the training has raised."""
        if has_raised():
            self.cut()
        return max(LEAST, min(CLOSE_PATIENCE, signal_shutdown.get_seconds_left() / 4, self._until - time.monotonic()))
