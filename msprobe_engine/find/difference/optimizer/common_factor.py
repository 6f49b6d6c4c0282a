"""A factor that the updates of most parameters have in common: the clipping of all gradients by one norm. A gradient that is off moves that
norm, and with it the updates of all others; what has another factor is where the difference begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msprobe_engine.find.origin import RESULT, DifferenceOrigin

if TYPE_CHECKING:
    from msprobe_engine.find.difference.walk import DifferenceWalk

ALIKE = 0.02
"""Factors that are one and the same, with the round-off of 16 bits."""

SEVERAL = 4
"""Tensors that make a list of many."""


def other_factors_first(walker: DifferenceWalk, origins: Sequence[DifferenceOrigin]) -> list[DifferenceOrigin]:
    """The same origins; where the first of them is a call of the update that most parameters have, and most of these differ by one factor,
    the calls of its kind that differ by another one come first."""
    if not origins or origins[0].op <= walker.target.last_backward:
        return [*origins]
    kind = walker.target.kinds[origins[0].op]
    factors = {
        number: factor
        for number, origin in enumerate(origins)
        if walker.target.kinds[origin.op] == kind and (factor := _factor(walker, origin)) is not None
    }
    if len(factors) < SEVERAL or 0 not in factors:
        return [*origins]
    common = sorted(factors.values())[len(factors) // 2]
    alike = {number for number, factor in factors.items() if abs(factor / common - 1) < max(ALIKE, _round_off(origins[number]))}
    if 2 * len(alike) <= len(factors) or abs(common - 1) <= ALIKE:
        return [*origins]
    others = [number for number in factors if number not in alike]
    return [origins[number] for number in others] + [origin for number, origin in enumerate(origins) if number not in others]


def _round_off(origin: DifferenceOrigin) -> float:
    """How far round-off may move the result."""
    return origin.distance / origin.times if origin.times > 0 else 0.0


def _factor(walker: DifferenceWalk, origin: DifferenceOrigin) -> float | None:
    """How many times the golden run's result that of a call is."""
    if origin.kind != RESULT or min(origin.row, origin.other) < 0:
        return None
    norm, golden_norm = float(walker.side.stats[origin.row][3]), float(walker.golden.side.stats[origin.other][3])
    return norm / golden_norm if norm > 0 and golden_norm > 0 else None
