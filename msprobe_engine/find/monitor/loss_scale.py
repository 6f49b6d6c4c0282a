"""Two monitored runs whose losses are scaled by other powers of two from the start: gradients are that many times each other until the
scale is taken out, and that is no difference."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.monitor.number_pairs import Number

_NAME = "loss_scale"
_EXACT = 1e-6


def without_scale(items: Iterable[Number]) -> tuple[list[Number], list[str]]:
    """The numbers as they would be with the golden run's scale, and what is to be said of it."""
    items = list(items)
    scales = {(one.rank, one.step): one.target / one.golden for one in items if one.key.name.endswith(_NAME) and one.golden and one.target}
    if not scales:
        return items, []
    first = scales[min(scales, key=lambda place: (place[1], place[0]))]
    if first == 1.0 or first <= 0 or abs(math.log2(first) - round(math.log2(first))) > _EXACT:
        return items, []
    found = []
    for one in items:
        scale = scales.get((one.rank, one.step), 1.0)
        if one.key.name.endswith(_NAME) and scale == first:
            continue
        scaled = one._replace(target=one.target / scale) if "grad" in one.family else one
        found.append(scaled if scaled.distance < one.distance else one)
    return found, [Sentence("The loss scale is {0} times the golden run's; that was taken out.", f"{first:g}")]
