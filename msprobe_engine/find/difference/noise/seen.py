"""How far pairs of rows are apart, statistic by statistic, and what of each shows noise of their elements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.operator_traits import MOVES
from msprobe_engine.find.difference.harmless import left_out
from msprobe_engine.measure import distances, factorize, roundoff

if TYPE_CHECKING:
    from msprobe_engine.find.difference.walk import DifferenceWalk


class Seen:
    """What the statistics of pairs of rows show; lists, one item per pair.

    Attributes:
        norm, mean, element: relative differences of the norm, of the mean (to the root mean square) and of the extremes.
        elements: the largest difference that the elements themselves show, where they are saved; else 0.
        blank: nothing is known of its numbers (a part of something, redacted).
        other: no number says how far they are apart (another shape, NaN on one side, another checksum).
        rms, average, share, count, last, unit: as in `propagation.Operand`.
    """

    def __init__(self, walker: DifferenceWalk) -> None:
        left, right = factorize.columns(walker.rows)
        target, golden, m = walker.side, walker.golden.side, walker.measured
        a, b = target.stats[left], golden.stats[right]
        count = np.maximum(factorize.of_each(golden.shape, distances.elements)[right].astype(np.float64), 1.0)
        with np.errstate(all="ignore"):
            size = np.abs(b[:, 3])
            rms = size / np.sqrt(count)
            top = np.maximum(np.abs(b[:, 0]), np.abs(b[:, 1]))
            exact = m.distance == 0
            # an infinity (of a mask) leaves nothing but the extremes: what is finite of them says how large the elements are
            blind = ~np.isfinite(size) & np.isfinite(m.distance)
            hidden = ~m.known & (np.maximum(a[:, 1], b[:, 1]) <= left_out.HIDDEN)
            blind |= hidden
            finite = np.where(np.isfinite(b[:, :2]) & (b[:, :2] > left_out.HIDDEN), np.abs(b[:, :2]), 0.0).max(1)
            rms, size, top = np.where(blind, finite, rms), np.where(blind, finite, size), np.where(blind, finite, top)
            nothing = ~np.isfinite(b[:, 3]) & ~np.isfinite(b[:, :2]).any(1)
            left_aside = exact & (a != b).any(1)  # its numbers are no others, and not the same ones (`Distances.leave_out`)
            self.blank = (((nothing | left_aside) & ~m.known) | hidden).tolist()
            self.norm = _numbers(np.where(blind, 0.0, np.abs(np.abs(a[:, 3]) - size) / size), exact)
            self.mean = _numbers(np.where(blind, 0.0, np.abs(a[:, 2] - b[:, 2]) / rms), exact)
            element = np.abs(a[:, :2] - b[:, :2]).max(1) / top  # of a mask, where one covers some
            self.element = _numbers(np.where(blind, m.distance, element), exact)
            untold = (m.distance >= 1) & ~np.array([self.norm, self.mean, self.element]).any(0)  # a statistic is NaN on one side
            self.other = ((np.isinf(m.distance) | untold) & ~m.argument).tolist()
            mine, theirs = (factorize.of_each(side.dtype, roundoff.eps)[rows] / 2 for side, rows in ((target, left), (golden, right)))
            unit = np.where(theirs > 0, theirs, mine)
            # elements that are moved have been rounded by a cast before, or will be by one behind: that computes, and says of which type
            either = True if walker.mostly_other_dtypes(mine, theirs) else _moves(walker)[left]
            unit = np.where(either, np.maximum(mine, theirs), unit)
            share = roundoff.share(count, size, top, b[:, 0] - b[:, 1], unit)
        self.elements = np.where(m.elements & np.isfinite(m.distance), m.distance, 0.0).tolist()
        self.rms, self.average, self.share = np.nan_to_num(rms).tolist(), np.nan_to_num(np.abs(b[:, 2])).tolist(), share.tolist()
        self.count, self.unit = count.astype(np.int64).tolist(), unit.tolist()
        self.last = factorize.of_each(golden.shape, _last)[right].astype(np.int64).tolist()

    def moved(self, at: int) -> bool:
        """There is a difference."""
        return bool(self.norm[at] or self.mean[at] or self.element[at] or self.elements[at] or self.other[at])

    def largest(self, at: int) -> float:
        """Of elements, as far as the statistics tell."""
        if self.other[at]:
            return 1.0
        by_norm = self.norm[at] / self.share[at]
        largest: float = max(self.mean[at] * math.sqrt(self.count[at]), by_norm, self.element[at], self.elements[at])
        return largest


def _moves(walker: DifferenceWalk) -> npt.NDArray[np.bool_]:
    """bool (rows of the target): of a call that only moves elements."""
    kinds = walker.target.kinds
    moves = np.fromiter((len(kind) == 3 and kind[2] in MOVES for kind in kinds), bool, len(kinds))
    return moves[np.frombuffer(walker.side.op, np.int64)] if len(walker.side.op) else np.zeros(0, bool)


def _numbers(values: npt.NDArray[np.float64], exact: npt.NDArray[np.bool_]) -> list[float]:
    found: list[float] = np.where(exact, 0.0, np.nan_to_num(values, nan=0.0, posinf=np.inf)).tolist()
    return found


def _last(shape: object) -> int:
    return int(shape[-1]) if isinstance(shape, list) and shape and isinstance(shape[-1], int) else 1
