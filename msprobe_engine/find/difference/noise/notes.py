"""What is known of the noise of each row while the records are gone over: what was seen of it, what was handed on, and how many times
round-off a difference is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msprobe_engine.align.parallel import parameter_owner
from msprobe_engine.core import operator_traits as traits
from msprobe_engine.find.difference.noise.seen import Seen
from msprobe_engine.formats.dump.dump_table import OUTPUT
from msprobe_engine.measure import factorize, propagation, roundoff
from msprobe_engine.measure.propagation import NONE, Noise

if TYPE_CHECKING:
    from msprobe_engine.find.difference.walk import DifferenceWalk

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


class NoiseNotes:
    """Of one rank of one step.

    Args:
        walker: both sides, their distances, and what was made of what.
        start: noise that this step begins with, of the end of the step before; None: it is the first one.
        products: noise of products with fewer bits of mantissa; 0 where there is none.

    Attributes:
        ratio, alone: one per pair of rows, see `noise.carried`.
        sharp: one per pair of rows: noise is small enough to tell a fault from it.
        judged: likewise: it is, or the rows differ by no more than so much noise explains.
        explained: pairs of rows that are arguments, numbers that differ by round-off.
        quiet: all rows so far were the same to the last bit.
    """

    def __init__(self, walker: DifferenceWalk, start: Noise | None, products: float) -> None:
        self._walker, self._start, self._products = walker, start, products
        self._seen: Seen | None = None
        pairs = len(walker.rows)
        self.ratio, self.alone = [0.0] * pairs, [0.0] * pairs
        self.sharp, self.judged = [True] * pairs, [True] * pairs
        self.explained: set[int] = set()
        self._notes: dict[int, Noise] = {}
        self._clean: dict[int, Noise] = {}
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
        right = factorize.columns(walker.rows)[1]
        self._measured = (roundoff.CALIBRATED * walker.moved[right]).tolist() if walker.calibrated else None
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
        found = self._recent_clean.largest
        return found if found != NONE else self._last

    @property
    def updated(self) -> dict[bytes, Noise]:
        """Noise of what the calls behind the backward pass gave out, by its numbers: the parameters of the step behind are among it. Copies
        of it (in another dtype) have the same."""
        side, tree = self._walker.side, self._walker.target
        found: dict[bytes, Noise] = {}
        for op in range(tree.last_backward + 1, len(tree.kinds)):
            came_in: list[Noise] = []
            for row in side.rows(op):
                key = side.stats[row].tobytes()
                if self._role[row] != OUTPUT:
                    came_in += [found[key]] if key in found else []
                elif row in self._notes or (came_in and hands_on(tree.kinds[op][-1])):  # several may have the same numbers
                    found[key] = largest((found.get(key, NONE), self._notes.get(row, largest(came_in))))
        return found

    def _times(self, pair: int, element: float, whole: float, bias: float, limit: float, behind: float = 0.0) -> float:
        """How many times what round-off may do; `behind`: noise of elements that no mask covers."""
        seen = self.seen
        if not seen.moved(pair):
            return 0.0
        rest = bias + element * element / 2 + roundoff.FLOOR
        count = seen.count[pair]
        norm = limit * (math.hypot(whole, element * seen.share[pair]) + rest)
        found: list[float] = [seen.norm[pair] / norm]
        if count > 1:
            mean = limit * (math.hypot(whole, element / math.sqrt(count)) + rest)
            single = limit * (element + roundoff.FLOOR)
            found += [seen.mean[pair] / mean, seen.element[pair] / single]
            if seen.elements[pair]:  # those that no mask covers
                visible = limit * (max(element, behind) + roundoff.FLOOR)
                found.append(seen.elements[pair] / visible)
        if seen.other[pair]:  # no number says how far
            found.append(0.0 if element >= roundoff.JUDGED else math.inf)
        if self._measured is not None:
            found = [min(max(found), float(self._walker.measured.distance[pair]) / self._measured[pair])]
        return max(found)


def largest(notes: Iterator[Noise] | Sequence[Noise] | deque[Noise]) -> Noise:
    element = whole = absolute = 0.0
    for note in notes:
        element, whole, absolute = max(element, note.element), max(whole, note.whole), max(absolute, note.absolute)
    return Noise(element, whole, absolute)


def grown(noise: Noise, unit: float, gain: float = propagation.MODULE_GAIN) -> Noise:
    """Through something of which nothing is known, and that rounds a few times."""
    new = _ROUNDINGS * roundoff.fresh(unit)
    element = min(roundoff.JUDGED, max(gain * noise.element, new))
    return Noise(element, min(roundoff.JUDGED, gain * noise.whole + roundoff.BIAS * new), gain * noise.absolute)


def hands_on(api: str) -> bool:
    """What comes out are elements of what went in."""
    return api in traits.MOVES or api in traits.HANDS_ON or api in traits.MASKINGS
