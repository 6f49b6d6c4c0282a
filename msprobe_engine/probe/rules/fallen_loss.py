"""What rules know of a loss that has fallen to almost nothing: gradients fall with it, and at its end there is nothing left to learn."""

from __future__ import annotations

import math

import numpy as np

from msprobe_engine.core.records import Frame
from msprobe_engine.probe.rules.tensor_kinds import scalar_kind
from msprobe_engine.probe.rules.tracked_series import Level

_RESOLUTION = 2.0**-20
"""What is left of a loss below this part of its beginning is round-off: that of float32, sixteen times over."""
_ON_THE_WAY = 2.0**-4
"""A loss that was learned has been here, between its beginning and its end; one without a label falls to 0 at once."""


class Remainder:
    """What is left of one loss."""

    def __init__(self) -> None:
        self._began = math.nan
        self._least = math.inf

    def is_nothing(self, value: float) -> bool:
        """One more value: has the loss come down to nothing, on the way of a loss that is learned?"""
        value = abs(value)
        if math.isnan(self._began) and 0.0 < value < math.inf:
            self._began = value
        learned = value <= _RESOLUTION * self._began and self._least <= _ON_THE_WAY * self._began
        if value > 0.0:
            self._least = min(self._least, value)
        return learned


class Fall:
    """How far the losses of a step are below their running levels.

    Args:
        window: steps that a level looks back.
        warmup: values before it counts as known.
    """

    def __init__(self, window: int, warmup: int) -> None:
        self._window, self._warmup = window, warmup
        self._levels: dict[str, Level] = {}

    def of(self, frame: Frame) -> float:
        """Logarithm of loss / level, of that loss which has fallen least; 0 where none has, or none is known."""
        falls = []
        for name, value in frame.scalars.items():
            if scalar_kind(name) != "loss":
                continue
            level = self._levels.setdefault(name, Level(self._window, self._warmup))
            healthy, slot = np.array([0.0 < abs(value) < math.inf]), np.zeros(1, np.intp)
            distance = level.measure(np.array([abs(value)]), slot, healthy)
            level.add(distance, slot, healthy)
            falls.append(float(distance.away[0]) if healthy[0] else 0.0)
        return max((min(fall, 0.0) for fall in falls if not math.isnan(fall)), default=0.0)
