"""What is known of the noise of each row while the records are gone over: what was seen of it, what was handed on, and how many times
round-off a difference is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.parallel import parameter_owner
from msprobe_engine.core import operator_traits as traits
from msprobe_engine.core.operator_traits import MOVES
from msprobe_engine.find.difference.harmless import left_out
from msprobe_engine.find.difference.paired_rank import PairedRank, Ratios
from msprobe_engine.formats.dump.dump_table import OUTPUT
from msprobe_engine.measure import distances, factorize, propagation, roundoff
from msprobe_engine.measure.propagation import NONE, Noise

RECENT = 24
"""Records back that something without a producer may have been made of."""

_ROUNDINGS = 2.0
"""Of code of which nothing is known, in those of one call."""


class RecentNoise:
    """Noise of the last records."""

    def __init__(self, *notes: Noise) -> None:
        self._notes = deque(notes, RECENT)
        self._largest: Noise | None = None

    def append(self, note: Noise) -> None:
        """That of another record."""
        known, gone = self._largest, self._notes[0] if len(self._notes) == RECENT else NONE
        self._notes.append(note)
        if known is None or gone.element >= known.element or gone.whole >= known.whole or gone.absolute >= known.absolute:
            self._largest = None
        elif note.element > known.element or note.whole > known.whole or note.absolute > known.absolute:
            self._largest = largest((known, note))

    @property
    def largest(self) -> Noise:
        """Of the largest."""
        if self._largest is None:
            self._largest = largest(self._notes)
        return self._largest


class NoiseNotes(Ratios):
    """Of one rank of one step.

    Args:
        walker: both sides, their distances, and what was made of what.
        start: noise that this step begins with, of the end of the step before; None: it is the first one.
        products: noise of products with fewer bits of mantissa; 0 where there is none.

    Attributes:
        ratio, alone: one per pair of rows, see `noise.carried`.
        sharp: one per pair of rows: noise is small enough to tell a fault from it.
        judged: likewise: it is, or the rows differ by no more than so much noise explains.
        least: one per pair of rows that are results: the smallest f for which 1 + f times the tensor is told from round-off, infinite where
            none is; 0 of what is no result with noise.
        explained: pairs of rows that are arguments, numbers that differ by round-off.
        quiet: all rows so far were the same to the last bit.
    """

    def __init__(self, walker: PairedRank, start: Noise | None, products: float) -> None:
        self._walker, self._start, self._products = walker, start, products
        self._seen: Seen | None = None
        pairs = len(walker.rows)
        self.ratio, self.alone = [0.0] * pairs, [0.0] * pairs
        self.sharp, self.judged, self.least = [True] * pairs, [True] * pairs, [0.0] * pairs
        self.explained: set[int] = set()
        self._notes: dict[int, Noise] = {}
        self._clean: dict[int, Noise] = {}
        self._choices: dict[int, float] = {}  # row of integers or bool given out -> noise of the numbers that chose them
        self._coarse: dict[int, float] = {}  # row given out -> half a unit that its elements were rounded to on the way, where it is more
        self._sources: dict[int, int] = {}  # row taken in -> row given out that it has the numbers of
        self._units: dict[int, float] = {}  # pair of rows taken in -> half a unit that its elements came through
        self._role = walker.side.role
        before = (start,) if start else ()
        self._recent, self._recent_clean = RecentNoise(*before), RecentNoise(*before)
        self._last = NONE  # of the last record that has any
        self._shown = deque[float]((), RECENT)  # what norms and means of the last records that are no fault have differed by
        self._parted = False  # a fault was met
        self._later = start is not None and start != NONE  # a backward pass was met whose noise is in the weights
        self._of_gradients: dict[parameter_owner.Owner | None, Noise] = {}  # of each parameter; None: the largest of all
        golden_rows = factorize.columns(walker.rows)[1]
        self._measured = (roundoff.CALIBRATED * walker.moved[golden_rows]).tolist() if walker.calibrated else None
        self.quiet = start is None or start == NONE

    @property
    def seen(self) -> Seen:
        """What the statistics show."""
        if self._seen is None:
            self._seen = Seen(self._walker)
        return self._seen

    def forget(self) -> None:
        """Let go of what is found again when it is asked for."""
        self._seen = None
        self._sources, self._units = {}, {}
        for name in ("_paired", "_kept"):
            self.__dict__.pop(name, None)

    def _note_gradient(self, row: int) -> None:
        """Noise of a parameter's gradient, of whichever micro batch has most."""
        side, note = self._walker.side, self._clean.get(row, self._notes.get(row, NONE))
        owner = parameter_owner.owner_of(side, row, self._walker.target.kinds[side.op[row]])
        for key in (owner, None):
            self._of_gradients[key] = largest((self._of_gradients.get(key, NONE), note))

    def _of_gradient(self, row: int) -> Noise:
        """What an update takes in is made of the gradient of its parameter; of any, where no number tells which one it is."""
        side = self._walker.side
        mark = parameter_owner.mark(side, row)
        owner = self._walker.owners[0].get(side.op[row]) or (self._walker.owners[1].get(mark) if mark is not None else None)
        return self._of_gradients.get(owner, self._of_gradients[None])

    @property
    def end(self) -> Noise:
        """Of the largest of the last records; where they are the same to the last bit, of the last one that is not."""
        largest = self._recent_clean.largest
        return largest if largest != NONE else self._last

    @property
    def updated(self) -> dict[bytes, Noise]:
        """Noise of what the calls behind the backward pass gave out, by its numbers: the parameters of the step behind are among it. Copies
        of it (in another dtype) have the same."""
        side, tree = self._walker.side, self._walker.target
        noises: dict[bytes, Noise] = {}
        for op in range(tree.last_backward + 1, len(tree.kinds)):
            came_in: list[Noise] = []
            for row in side.rows(op):
                key = side.stats[row].tobytes()
                if self._role[row] != OUTPUT:
                    came_in += [noises[key]] if key in noises else []
                elif row in self._notes or (came_in and hands_on(tree.kinds[op][-1])):  # several may have the same numbers
                    noises[key] = largest((noises.get(key, NONE), self._notes.get(row, largest(came_in))))
        return noises

    def update_of_zeros(self, owner: parameter_owner.Owner) -> Noise:
        """Of a parameter that was zero in this step and that an optimizer moves at its end, whose calls are not recorded."""
        gradient = self._of_gradients.get(owner, self._of_gradients.get(None, NONE))
        return Noise(min(roundoff.JUDGED, propagation.update_of_zeros(gradient.element)), 0.0, 0.0)

    def smallest_factors(self) -> npt.NDArray[np.float64]:
        """`least` of the results that have noise."""
        least = np.array(self.least)
        return np.asarray(least[least > 0])

    def _limits(self, pair: int, element: float, whole: float, bias: float, limit: float) -> tuple[float, float, float]:
        """By how much round-off may move the norm, the mean and the extremes of a tensor."""
        rest = bias + element * element / 2 + roundoff.FLOOR
        norm = limit * (math.hypot(whole, element * self.seen.share[pair]) + rest)
        mean = limit * (math.hypot(whole, element / math.sqrt(self.seen.count[pair])) + rest)
        return norm, mean, limit * (element + roundoff.FLOOR)

    def _smallest_factor(self, pair: int, element: float, whole: float, bias: float, limit: float) -> float:
        """See `least`: a factor moves the norm and the extremes by as much as it differs from 1, the mean by its part of the elements."""
        norm, mean, single = self._limits(pair, element, whole, bias, limit)
        average = self.seen.average[pair] / self.seen.rms[pair]
        by_mean = mean / average if average else math.inf
        if self._walker.rows[pair][0] in self._walker.by_mean:
            factor = by_mean
        else:
            factor = min(norm, by_mean, single) if self.seen.count[pair] > 1 else norm
        return factor if self._measured is None else max(factor, self._measured[pair])

    def _times(self, pair: int, element: float, whole: float, bias: float, limit: float, behind: float = 0.0) -> float:
        """How many times what round-off may do; `behind`: noise of elements that no mask covers."""
        seen = self.seen
        if not seen.has_difference(pair):
            return 0.0
        norm, mean, single = self._limits(pair, element, whole, bias, limit)
        times: list[float] = [seen.norm[pair] / norm]
        if seen.count[pair] > 1:
            times += [seen.mean[pair] / mean, seen.element[pair] / single]
            if seen.elements[pair]:  # those that no mask covers
                visible = limit * (max(element, behind) + roundoff.FLOOR)
                times.append(seen.elements[pair] / visible)
        if seen.other[pair]:  # no number says how far
            times.append(0.0 if element >= roundoff.JUDGED else math.inf)
        if self._measured is not None:
            times = [min(max(times), float(self._walker.measured.distance[pair]) / self._measured[pair])]
        return max(times)


def largest(notes: Iterator[Noise] | Sequence[Noise] | deque[Noise]) -> Noise:
    element = whole = absolute = 0.0
    for note in notes:
        element, whole, absolute = max(element, note.element), max(whole, note.whole), max(absolute, note.absolute)
    return Noise(element, whole, absolute)


def grow_noise(noise: Noise, unit: float, gain: float = propagation.MODULE_GAIN) -> Noise:
    """Through something of which nothing is known, and that rounds a few times."""
    new = _ROUNDINGS * roundoff.fresh(unit)
    element = min(roundoff.JUDGED, max(gain * noise.element, new))
    return Noise(element, min(roundoff.JUDGED, gain * noise.whole + roundoff.BIAS * new), gain * noise.absolute)


def hands_on(api: str) -> bool:
    """What comes out are elements of what went in."""
    return api in traits.MOVES or api in traits.HANDS_ON or api in traits.MASKINGS


class Seen:
    """What the statistics of pairs of rows show; lists, one item per pair.

    Attributes:
        norm, mean, element: relative differences of the norm, of the mean (to the root mean square) and of the extremes.
        elements: the largest difference that the elements themselves show, where they are saved; else 0.
        blank: nothing is known of its numbers (a part of something, redacted).
        other: no number says how far they are apart (another shape, NaN on one side, another checksum).
        rms, average, share, count, last, unit: as in `propagation.Operand`.
        visible: `rms`, but of what a mask hides by a large negative number the largest of the other elements: the gradient of what it hides
            is zero, whatever the number.
    """

    def __init__(self, walker: PairedRank) -> None:
        target_rows, golden_rows = factorize.columns(walker.rows)
        target, golden, m = walker.side, walker.golden.side, walker.measured
        target_stats, golden_stats = target.stats[target_rows], golden.stats[golden_rows]
        count = np.maximum(factorize.of_each(golden.shape, distances.elements)[golden_rows].astype(np.float64), 1.0)
        with np.errstate(all="ignore"):
            size = np.abs(golden_stats[:, 3])
            rms = size / np.sqrt(count)
            top = np.maximum(np.abs(golden_stats[:, 0]), np.abs(golden_stats[:, 1]))
            exact = m.distance == 0
            # an infinity (of a mask) leaves nothing but the extremes: what is finite of them says how large the elements are
            blind = ~np.isfinite(size) & np.isfinite(m.distance)
            hidden = ~m.known & (np.maximum(target_stats[:, 1], golden_stats[:, 1]) <= left_out.HIDDEN)
            blind |= hidden
            finite = np.where(
                np.isfinite(golden_stats[:, :2]) & (golden_stats[:, :2] > left_out.HIDDEN), np.abs(golden_stats[:, :2]), 0.0
            ).max(1)
            rms, size, top = np.where(blind, finite, rms), np.where(blind, finite, size), np.where(blind, finite, top)
            masks = (golden_stats[:, 1] <= left_out.HIDDEN) & distances.has_mask_constant(np.abs(golden_stats[:, :2]))
            visible = np.where(masks, finite, rms)
            nothing = ~np.isfinite(golden_stats[:, 3]) & ~np.isfinite(golden_stats[:, :2]).any(1)
            left_aside = exact & (target_stats != golden_stats).any(
                1
            )  # its numbers are no others, and not the same ones (`Distances.leave_out`)
            # what an infinity leaves of statistics that are the same is a zero: it says nothing of the other elements (the sum of decays)
            unseen = blind & exact & (finite == 0)
            self.blank = (((nothing | left_aside) & ~m.known) | hidden | unseen).tolist()
            self.norm = _numbers(np.where(blind, 0.0, np.abs(np.abs(target_stats[:, 3]) - size) / size), exact)
            self.mean = _numbers(np.where(blind, 0.0, np.abs(target_stats[:, 2] - golden_stats[:, 2]) / rms), exact)
            element = np.abs(target_stats[:, :2] - golden_stats[:, :2]).max(1) / top  # of a mask, where one covers some
            self.element = _numbers(np.where(blind, m.distance, element), exact)
            untold = (m.distance >= 1) & ~np.array([self.norm, self.mean, self.element]).any(0)  # a statistic is NaN on one side
            self.other = ((np.isinf(m.distance) | untold) & ~m.argument).tolist()
            target_units, golden_units = (
                factorize.of_each(side.dtype, roundoff.eps)[rows] / 2 for side, rows in ((target, target_rows), (golden, golden_rows))
            )
            unit = np.where(golden_units > 0, golden_units, target_units)
            # elements that are moved have been rounded by a cast before, or will be by one behind: that computes, and says of which type
            # The runs are of different precision as a whole (not one call of them)
            floats = golden_units > 0
            either = True if 2 * int((target_units != golden_units)[floats].sum()) > int(floats.sum()) else _moves(walker)[target_rows]
            unit = np.where(either, np.maximum(target_units, golden_units), unit)
            share = roundoff.share(count, size, top, golden_stats[:, 0] - golden_stats[:, 1], unit)
        self.elements = np.where(m.elements & np.isfinite(m.distance), m.distance, 0.0).tolist()
        self.rms, self.average, self.share = np.nan_to_num(rms).tolist(), np.nan_to_num(np.abs(golden_stats[:, 2])).tolist(), share.tolist()
        self.visible = np.nan_to_num(visible).tolist()
        self.count, self.unit = count.astype(np.int64).tolist(), unit.tolist()
        self.last = factorize.of_each(golden.shape, _last)[golden_rows].astype(np.int64).tolist()

    def has_difference(self, pair: int) -> bool:
        """There is a difference."""
        return bool(self.norm[pair] or self.mean[pair] or self.element[pair] or self.elements[pair] or self.other[pair])

    def largest(self, pair: int) -> float:
        """Of elements, as far as the statistics tell."""
        if self.other[pair]:
            return 1.0
        by_norm = self.norm[pair] / self.share[pair]
        largest: float = max(self.mean[pair] * math.sqrt(self.count[pair]), by_norm, self.element[pair], self.elements[pair])
        return largest


def _moves(walker: PairedRank) -> npt.NDArray[np.bool_]:
    """bool (rows of the target): of a call that only moves elements."""
    kinds = walker.target.kinds
    moves = np.fromiter((len(kind) == 3 and kind[2] in MOVES for kind in kinds), bool, len(kinds))
    return moves[np.frombuffer(walker.side.op, np.int64)] if len(walker.side.op) else np.zeros(0, bool)


def _numbers(values: npt.NDArray[np.float64], exact: npt.NDArray[np.bool_]) -> list[float]:
    numbers: list[float] = np.where(exact, 0.0, np.nan_to_num(values, nan=0.0, posinf=np.inf)).tolist()
    return numbers


def _last(shape: object) -> int:
    return int(shape[-1]) if isinstance(shape, list) and shape and isinstance(shape[-1], int) else 1
