"""Which of the numbers that differ in a step is nearest to the cause.

Calls of the forward and of the backward pass are written as they happen, and the first one is named. Gradients of parameters come at one
moment in the order of the model, and the backward pass made them the other way round. Where the forward pass of the step is the same, the
first of them in that order is named. Where it is not, a cause in the forward pass moves all of them, and the nearest one most: of those
that are about as far off as the furthest, the first is named. What the optimizer does, it does to all parameters at once: the furthest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msprobe_engine.find.monitor.number_pairs import Number
from msprobe_engine.find.monitor.series_noise import GROWTH
from msprobe_engine.formats.monitor.alert_order import Moment

_IN_ORDER = (Moment.FORWARD, Moment.BACKWARD)
_MADE_BACKWARDS = (Moment.ACCUMULATED, Moment.REDUCED, Moment.UNSCALED, Moment.CLIPPED)
_OF_FORWARD = ("loss", "actv")


def nearest_first(off: Iterable[Number], step: Sequence[Number]) -> list[Number]:
    """Sort what differs in a step.

    Args:
        off: what differs by more than round-off.
        step: all numbers of the step.
    """
    off = list(off)
    forward = [item.distance for item in step if item.family in _OF_FORWARD]
    same = bool(forward) and not any(forward)
    furthest: dict[tuple[int, ...], float] = {}
    for item in off:
        furthest[item.order[:3]] = max(furthest.get(item.order[:3], 0.0), item.distance)

    def key(item: Number) -> tuple[tuple[int, ...], float, float, int]:
        moment, place = item.order[2], item.order[3]
        if moment in _IN_ORDER:
            return item.order[:3], 0.0, place, item.rank
        if moment not in _MADE_BACKWARDS:
            return item.order[:3], -item.distance, place, item.rank
        far = 0.0 if same or item.distance * GROWTH >= furthest[item.order[:3]] else -item.distance
        return item.order[:3], float(far != 0.0), far or -place, item.rank

    return sorted(off, key=key)
