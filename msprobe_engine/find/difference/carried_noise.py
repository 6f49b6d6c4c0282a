"""What round-off explains of a difference, record after record: noise is carried from the calls that make tensors to those that use them.

Each pair of rows gets a number, the largest of what its statistics say: how many times what round-off may do. Above 1 it is a difference
that has to begin somewhere. There are two of them: `ratio` takes for granted whatever goes in, so that it is large only where something
begins; `alone` takes only what round-off makes of it, so that it stays large behind a fault.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from msprobe_engine.core import operator_traits as traits
from msprobe_engine.find.difference import bridges
from msprobe_engine.find.difference.seen import Seen
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD
from msprobe_engine.measure import factorize, propagation, roundoff
from msprobe_engine.measure.propagation import NONE, Carried, Noise, Operand, Result

if TYPE_CHECKING:
    from msprobe_engine.find.difference.walk import DifferenceWalk

_RECENT = 24
"""Records back that something without a producer may have been made of."""

_ROUNDINGS = 2.0
"""Of code of which nothing is known, in those of one call."""

_OF_NORMS = 2.0
"""So many times what statistics of single tensors show is round-off of a number that is made of many (their common norm)."""

_SIMPLE = (traits.ELEMENTWISE, traits.SCALINGS, traits.ADDITIONS, traits.MOVES, traits.HANDS_ON)
"""Calls, of one side only, that do to noise what is known."""

_KEEP_ELEMENTS = traits.ELEMENTWISE | traits.SCALINGS | traits.MOVES | traits.HANDS_ON
"""Calls of which each element is made of one element, which moves by no less than a unit of the dtype it came through."""

_UNKNOWN = Noise(1.0, 1.0, 0.0)


class _Recent:
    """Noise of the last records."""

    def __init__(self, *notes: Noise) -> None:
        self._notes = deque(notes, _RECENT)
        self._largest: Noise | None = None

    def append(self, note: Noise) -> None:
        """That of another record."""
        known, gone = self._largest, self._notes[0] if len(self._notes) == _RECENT else NONE
        self._notes.append(note)
        if known is None or gone.element >= known.element or gone.whole >= known.whole or gone.absolute >= known.absolute:
            self._largest = None
        elif note.element > known.element or note.whole > known.whole or note.absolute > known.absolute:
            self._largest = _largest((known, note))

    @property
    def largest(self) -> Noise:
        """Of the largest."""
        if self._largest is None:
            self._largest = _largest(self._notes)
        return self._largest


class CarriedNoise:
    """Goes over the records of one rank of one step, in the order of execution.

    Args:
        walker: both sides, their distances, and what was made of what.
        start: noise that this step begins with, of the end of the step before; None: it is the first one.
        products: noise of products with fewer bits of mantissa; 0 where there is none.

    Attributes:
        ratio, alone: one per pair of rows, see the module.
        judged: one per pair of rows: noise is small enough to tell a fault from it.
        explained: pairs of rows that are arguments, numbers that differ by round-off.
        end: noise at the end of the step.
    """

    def __init__(self, walker: DifferenceWalk, start: Noise | None, products: float) -> None:
        self._walker, self._start, self._products = walker, start, products
        self._seen: Seen | None = None
        pairs = len(walker.rows)
        self.ratio, self.alone = [0.0] * pairs, [0.0] * pairs
        self.judged = [True] * pairs
        self.explained: set[int] = set()
        self._notes: dict[int, Noise] = {}
        self._clean: dict[int, Noise] = {}
        self._coarse: dict[int, float] = {}  # row given out -> half a unit that its elements were rounded to on the way, where it is more
        self._role = walker.side.role
        before = (start,) if start else ()
        self._recent, self._recent_clean = _Recent(*before), _Recent(*before)
        self._last = NONE  # of the last record that has any
        self._shown = deque[float]((), _RECENT)  # what norms and means of the last records that are no fault have differed by
        self._parted = False  # a fault was met
        self._later = start is not None and start != NONE  # a backward pass was met whose noise is in the weights
        self._of_gradients = NONE  # the largest of those of parameters
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
        for name in ("_paired", "_kept"):
            self.__dict__.pop(name, None)

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
            came_in = NONE
            for row in side.rows(op):
                key = side.stats[row].tobytes()
                if self._role[row] != OUTPUT:
                    came_in = _largest((came_in, found.get(key, NONE)))
                elif row in self._notes or _hands_on(tree.kinds[op][-1]):  # several may have the same numbers
                    found[key] = _largest((found.get(key, NONE), self._notes.get(row, came_in)))
        return found

    @cached_property
    def _paired(self) -> set[int]:
        """Rows of the target that have a partner."""
        return {row for row, _ in self._walker.rows}

    @cached_property
    def _of_backward(self) -> float:
        """Half a unit of the coarsest dtype of the backward pass: gradients in float32 are made of its tensors."""
        side, kinds = self._walker.side, self._walker.target.kinds
        return max((roundoff.eps(side.dtype[row]) / 2 for row in range(len(side)) if kinds[side.op[row]][0] == "backward"), default=0.0)

    @cached_property
    def _kept(self) -> dict[int, list[int]]:
        """Pair of records -> pairs of records whose tensors autograd has kept for it."""
        own, twins, members, groups = self._walker.kept
        found: dict[int, list[int]] = {}
        for at, behind in (*zip(own.tolist(), twins.tolist()), *zip(groups.tolist(), members.tolist())):
            found.setdefault(at, []).append(behind)
        return found

    def look(self, at: int) -> None:
        """Judge the next pair of records, and note what it hands on."""
        walker, seen = self._walker, self.seen
        span = range(walker.starts[at], walker.starts[at + 1])
        if self.quiet and not any(seen.moved(pair) or (seen.blank[pair] and seen.unit[pair]) for pair in span):
            return
        self.quiet = False
        op = walker.structure.pairs[at][0]
        kind = walker.target.kinds[op]
        gradients = walker.target.gradients[op]
        backward = gradients or kind[0] == "backward"
        self._later |= backward
        limit = roundoff.LATER if self._later else roundoff.FORWARD
        api = kind[2] if len(kind) == 3 else None
        taken = [pair for pair in span if self._role[walker.rows[pair][0]] in (INPUT, PARAMETERS)]
        if api is not None and not backward:
            taken = [pair for pair in taken if not self._written_over(api, walker.rows[pair][0])]
        going_in = [self._going_in(pair, limit) for pair in taken]
        inputs, clean = ([two[k] for two in going_in if two is not None] for k in (0, 1))
        kept, kept_clean = self._behind(at, inputs, clean) if backward else ([], [])
        coarse = max(map(self._came_through, taken), default=0.0) if api in _KEEP_ELEMENTS and not backward else 0.0
        blank = not all(one.rms for one in (*inputs, *kept))
        inside = walker.target.children.get(op, ()) if not gradients else ()
        if not inputs and self._later and any(isinstance(walker.side.values.get(walker.rows[pair][0]), float) for pair in span):
            level = max(self._shown, default=0.0)  # made of numbers that were tensors before
            inputs = clean = [Operand(Noise(level, level, 0.0), 0.0, 0.0, 1.0, 1, 1, 0.0)]
            blank = True
        for pair in span:
            row = walker.rows[pair][0]
            if self._role[row] not in (OUTPUT, PARAMETERS_GRAD):
                continue
            if seen.blank[pair] and seen.unit[pair] and not seen.other[pair]:  # nobody can say what it hands on
                exact = api is not None and not backward and (api in traits.LOOKUPS or _hands_on(api))
                unit = 0.0 if exact else self._coarsest(pair, row, inputs, kept)
                self._notes[row], self._clean[row] = (_grown(_largest(one.noise for one in some), unit, 1.0) for some in (inputs, clean))
                if self._later:  # gradients are summed in buffers that no record leads to
                    self._recent.append(self._notes[row])
                    self._recent_clean.append(self._clean[row])
                if gradients:
                    self._of_gradients = _largest((self._of_gradients, self._clean[row]))
                continue
            if not seen.unit[pair] or not seen.rms[pair]:
                self._exact(pair, inputs)
                continue
            result = Result(seen.rms[pair] / self._added_up(op, api, inputs), seen.count[pair], seen.unit[pair])
            if blank:
                inputs, clean, kept, kept_clean = ([_sized(one, result) for one in some] for some in (inputs, clean, kept, kept_clean))
            if api in traits.BY_INDEX and not backward and any(map(self._chosen_otherwise, taken)):
                inputs, clean = ([*some, _of_others(result)] for some in (inputs, clean))
            carried = self._carried(api, backward, gradients, inputs, kept, result, inside, self._notes)
            bare = carried if not self._parted else self._carried(api, backward, gradients, clean, kept_clean, result, inside, self._clean)
            if coarse > seen.unit[pair]:
                self._coarse[row] = coarse
            self._judge(pair, api, limit, inputs, kept, carried, bare, bool(inside))
            if gradients:
                self._of_gradients = _largest((self._of_gradients, self._clean.get(row, self._notes[row])))

    def _added_up(self, op: int, api: str | None, inputs: Sequence[Operand]) -> float:
        """Of so many tokens a loss is the sum; 1 of what is none."""
        side = self._walker.side
        if api not in traits.LOSSES_OF_CLASSES or not any(side.values.get(row) == "sum" for row in side.rows(op)):
            return 1.0
        return max((one.size / max(one.last, 1) for one in inputs), default=1.0)

    # what goes in

    def _written_over(self, api: str, row: int) -> bool:
        """What a tensor held before the call goes nowhere."""
        return api in traits.OVERWRITES or (api == "copy_" and self._walker.side.name[row].endswith(".input.0"))

    def _going_in(self, pair: int, limit: float) -> tuple[Operand, Operand] | None:
        """An input with its noise as it is, and as round-off explains it; None: no tensor of floating point numbers."""
        walker, seen = self._walker, self.seen
        row = walker.rows[pair][0]
        if walker.measured.argument[pair] and (number := self._number(pair)) is not None:
            return number, number
        known = seen.rms[pair] or seen.other[pair] or seen.blank[pair]
        if not seen.unit[pair] or not known or walker.measured.argument[pair]:
            if not walker.measured.argument[pair] and walker.measured.distance[pair]:
                self._exact_input(pair, row)
            return None
        made = None if self._is_parameter_alone(pair) else self._made(row, self._came_through(pair))
        if made is None or walker.target.producers.get(row) in walker.extra:
            noise, clean = self._appears(pair, row, limit, made)
        else:
            noise, clean = made
            self._judge_input(pair, noise, clean, limit)
            if self.ratio[pair] > 1:  # changed since, by something without a record
                noise = self._as_seen(pair)[0]
            excused = float(walker.cancelled.excused[pair])
            if excused:
                noise = clean = Noise(max(noise.element, excused), max(noise.whole, excused), max(noise.absolute, excused * seen.rms[pair]))
        return self._operand(pair, noise), self._operand(pair, clean)

    def _is_parameter_alone(self, pair: int) -> bool:
        """A parameter that calls which do not belong together gave out: others have the same numbers (biases after one update)."""
        walker = self._walker
        row, other = walker.rows[pair]
        mine, theirs = walker.target.producers.get(row), walker.golden.producers.get(other)
        partner = -1 if theirs is None else walker.back.get(theirs, -1)
        return mine is not None and mine not in walker.extra and partner != mine and walker.is_parameter(row)

    def _chosen_otherwise(self, pair: int) -> bool:
        """Whole numbers that are others because of noise in what they were made of: an expert takes other tokens."""
        return not self.seen.unit[pair] and float(self._walker.measured.distance[pair]) > 0 and self.alone[pair] <= 1

    def _number(self, pair: int) -> Operand | None:
        """A Python number that differs by what round-off does to numbers that are made of tensors (a factor that clips gradients by their
        norm); None: it differs by more, or is no such number."""
        walker = self._walker
        other = walker.rows[pair][1]
        value, distance = walker.golden.side.values.get(other), float(walker.measured.distance[pair])
        if not isinstance(value, float) or distance > _OF_NORMS * max(self._shown, default=0.0):
            return None
        self.explained.add(pair)
        return Operand(Noise(distance, distance, 0.0), abs(value), abs(value), 1.0, 1, 1, 0.0)

    def _judge_input(self, pair: int, noise: Noise, clean: Noise, limit: float) -> None:
        self.ratio[pair] = self._times(pair, noise.element, noise.whole, 0.0, limit)
        self.alone[pair] = self._times(pair, clean.element, clean.whole, 0.0, limit)
        self._parted |= self.alone[pair] > 1

    def _exact_input(self, pair: int, row: int) -> None:
        """Integers, and tensors of zeros: other ones begin somewhere, unless what made them has noise."""
        source = self._walker.target.producers.get(row)
        if source is None or source in self._walker.extra:
            noise = self._recent.largest.element
            distance = float(self._walker.measured.distance[pair])
            number = isinstance(self._walker.side.values.get(row), float)  # made of tensors in float32 (a factor that clips)
            known = (noise and distance <= roundoff.GROWTH * noise) or (number and distance <= roundoff.FLOOR)
            self.ratio[pair] = self.alone[pair] = 0.0 if known else roundoff.times_exact(distance)

    def _operand(self, pair: int, noise: Noise) -> Operand:
        seen = self.seen
        return Operand(noise, seen.rms[pair], seen.average[pair], seen.share[pair], seen.count[pair], seen.last[pair], seen.unit[pair])

    def _made(self, row: int, unit: float, depth: int = 0) -> tuple[Noise, Noise] | None:
        """Noise of what an earlier record gave out; None: no record did.

        Args:
            row: of the target.
            unit: of what it is compared with: calls of one side only may round as often as that, not to fewer bits.
            depth: such calls that were looked through.
        """
        walker = self._walker
        op = walker.target.producers.get(row)
        if op is None:
            return None
        if walker.position(op) >= 0:
            source = self._row_of(op, row)
            if source not in self._paired and not self.quiet:  # the record has a partner, and this of what it gives out has none
                return self._unrecorded(unit)
            return self._notes.get(source, NONE), self._clean.get(source, self._notes.get(source, NONE))
        if depth >= bridges.MOST:
            return None
        side = walker.side
        went_in = [
            self._made(other, unit, depth + 1) or self._unrecorded(unit)
            for other in side.rows(op)
            if side.role[other] in (INPUT, PARAMETERS) and roundoff.eps(side.dtype[other]) > 0
        ]
        if not went_in:
            return None
        kind = walker.target.kinds[op]
        simple = len(kind) == 3 and any(kind[2] in known for known in _SIMPLE)
        gain = 1.0 if depth else propagation.ELEMENTWISE_GAIN if simple else propagation.MODULE_GAIN  # gains are not compounded
        a, b = (_grown(_largest(two[k] for two in went_in), unit, gain) for k in (0, 1))
        return a, b

    def _came_through(self, pair: int) -> float:
        """Half a unit that the elements of an input were rounded to on their way: of the coarsest dtype that they came through, on both
        sides where both tell."""
        walker = self._walker
        row, other = walker.rows[pair]
        unit: float = self.seen.unit[pair]
        mine, theirs = walker.target.producers.get(row), walker.golden.producers.get(other)
        if mine is not None and mine not in walker.extra:
            return max(unit, self._coarse.get(self._row_of(mine, row), 0.0)) if self._coarse else unit
        told = [
            bridges.coarsest(tree, at, alone) / 2
            for tree, at, alone, op in ((walker.target, row, walker.extra, mine), (walker.golden, other, walker.missing, theirs))
            if op is not None
        ]
        return max(unit, min(told, default=0.0))

    def _row_of(self, op: int, row: int) -> int:
        """The output of a record whose numbers a row has; where none has exactly them, one that has none any more, or the first."""
        side = self._walker.side
        given = [other for other in side.rows(op) if side.role[other] == OUTPUT]
        for other in given:
            if side.stats[other].tobytes() == side.stats[row].tobytes():
                return other
        return next((other for other in given if side.shape[other] is None), given[0] if given else -1)

    def _unrecorded(self, unit: float) -> tuple[Noise, Noise]:
        """Of what was made by something without a record, of what came before it."""
        return _grown(self._recent.largest, unit), _grown(self._recent_clean.largest, unit)

    def _appears(self, pair: int, row: int, limit: float, bridged: tuple[Noise, Noise] | None) -> tuple[Noise, Noise]:
        """A tensor that no record of both sides has made: a parameter or data, or what code without a record makes, or calls of one side
        only (`bridged`: their noise)."""
        walker, seen = self._walker, self.seen
        if not (seen.moved(pair) or seen.blank[pair]):  # statistics that are the same to the last bit are those of the same numbers
            return NONE, NONE
        leaf = bridged is None and (self._role[row] == PARAMETERS or walker.is_parameter(row))
        read = Noise(2 * seen.unit[pair], 0.0, 0.0)  # rounded another way when it was loaded
        unit = seen.unit[pair]
        if not walker.one_layout and walker.side.op[row] > walker.target.last_backward:
            unit = max(unit, self._of_backward)
        noise, clean = bridged or ((read, read) if leaf and self._start is None else self._unrecorded(unit))
        if leaf and self._start is not None:
            moved = walker.update_noise(self._start)
            noise = clean = _largest((moved, Noise(seen.unit[pair] / 2, 0.0, 0.0))) if walker.other_update else moved
        elif bridged is None and self._of_gradients != NONE and walker.side.op[row] > walker.target.last_backward:
            # what an update takes in are gradients, in their buffers, and what an optimizer has made of them before
            before = (noise, clean) if self._start is not None else (NONE, NONE)
            noise, clean = (_largest((one, self._of_gradients)) for one in before)
        if bridged is None and (known := walker.updated.get(walker.side.stats[row].tobytes())) is not None:
            noise, clean = _largest((noise, known)), _largest((clean, known))
        excused = float(walker.cancelled.excused[pair])
        if excused:
            noise = clean = Noise(max(noise.element, excused), max(noise.whole, excused), 0.0)
        self._judge_input(pair, noise, clean, limit)
        if seen.blank[pair]:
            return noise, clean
        shared = max(seen.norm[pair], seen.mean[pair]) if not seen.other[pair] else 1.0
        element = min(1.0, max(seen.largest(pair), self._came_through(pair)))
        found = Noise(element, min(1.0, shared), element * seen.rms[pair])
        if self.ratio[pair] > 1:
            return found, Noise(clean.element, clean.whole, clean.element * seen.rms[pair])
        return found, found

    def _behind(self, at: int, inputs: list[Operand], clean: list[Operand]) -> tuple[list[Operand], list[Operand]]:
        """What autograd has kept of the way forward; gradients that a module's calls took in are added to what goes in."""
        walker, seen = self._walker, self.seen
        kept: list[Operand] = []
        kept_clean: list[Operand] = []
        for behind in self._kept.get(at, ()):
            op = walker.structure.pairs[behind][0]
            came_back = walker.target.kinds[op][0] == "backward"
            for pair in range(walker.starts[behind], walker.starts[behind + 1]):
                row = walker.rows[pair][0]
                if not seen.unit[pair] or not (seen.rms[pair] or seen.blank[pair]) or walker.measured.argument[pair]:
                    continue
                given = self._role[row] == OUTPUT
                if given and came_back:
                    continue
                if given:
                    one = self._notes.get(row, NONE)
                    two = self._clean.get(row, one)
                else:
                    one, two = self._made(row, seen.unit[pair]) or self._as_seen(pair)
                (inputs if came_back else kept).append(self._operand(pair, one))
                (clean if came_back else kept_clean).append(self._operand(pair, two))
        return kept, kept_clean

    def _as_seen(self, pair: int) -> tuple[Noise, Noise]:
        seen = self.seen
        element = seen.largest(pair)
        found = Noise(min(1.0, element), min(1.0, max(seen.norm[pair], seen.mean[pair])), element * seen.rms[pair])
        return found, found if self.alone[pair] <= 1 else NONE

    # what comes out

    def _carried(
        self,
        api: str | None,
        backward: bool,
        gradients: bool,
        inputs: Sequence[Operand],
        kept: Sequence[Operand],
        result: Result,
        inside: Sequence[int],
        notes: dict[int, Noise],
    ) -> Carried:
        if not inputs:
            found = Carried(0.0, 0.0)
        elif not any(one.noise.element or one.noise.whole for one in (*inputs, *kept)):
            exact = api is not None and not backward and _hands_on(api)
            found = Carried(0.0, 0.0, not exact or result.unit > min(one.unit for one in inputs))
        elif backward:
            found = propagation.backward(api, inputs, kept, result, gradients or api is None)
        elif api is None:
            found = propagation.through_module(inputs)
        else:
            found = propagation.forward(api, inputs, result, self._start is not None)
        if not inside:
            return found
        within = _largest(self._inside(inside, notes))
        return found._replace(element=max(found.element, within.element), whole=max(found.whole, within.whole))

    def _inside(self, calls: Sequence[int], notes: dict[int, Noise]) -> Iterator[Noise]:
        """Noise of what the calls directly inside of a module give out."""
        side = self._walker.side
        for op in calls:
            yield from (notes[row] for row in side.rows(op) if row in notes)

    def _judge(
        self, pair: int, api: str | None, limit: float, inputs: Sequence[Operand], kept: Sequence[Operand], carried: Carried, bare: Carried,
        around: bool,
    ) -> None:  # fmt: skip
        walker, seen = self._walker, self.seen
        row, _ = walker.rows[pair]
        unit = self._coarsest(pair, row, inputs, kept)
        new = roundoff.fresh(unit, max((one.last for one in inputs), default=1)) if carried.rounds else 0.0
        if self._products and walker.is_wide_product(pair):
            new = max(new, self._products)
        foreign = walker.foreign.get(walker.side.op[row], 0.0)
        bias = (roundoff.BIAS_OF_SUMS if api is not None and (api in traits.ADDITIONS or traits.is_product(api)) else roundoff.BIAS) * new
        element = math.hypot(carried.element, new)
        whole = carried.whole
        if foreign:
            element, whole = max(element, foreign), max(whole, foreign)
        excused = float(walker.cancelled.excused[pair])
        if excused:
            element, whole = max(element, excused), max(whole, excused)
        self.judged[pair] = element <= roundoff.JUDGED
        behind = max((one.noise.element for one in inputs), default=0.0) if carried.absolute is not None else 0.0
        if self.judged[pair]:
            self.ratio[pair] = self._times(pair, element, whole, bias, limit, behind)
        if not self._parted:
            self.alone[pair] = self.ratio[pair]
        else:
            self.alone[pair] = self._times(pair, math.hypot(bare.element, new), bare.whole, bias, limit, behind)
        note = self._note(pair, api, inputs, kept, carried, new)
        self._notes[row] = note
        if self.alone[pair] <= 1 and not seen.other[pair]:
            self._shown.append(max(seen.norm[pair], seen.mean[pair]))
        if self.alone[pair] > 1:
            self._parted = True
            explained = min(1.0, math.hypot(bare.element, new))
            self._clean[row] = Noise(explained, min(1.0, bare.whole + explained * seen.share[pair]), explained * seen.rms[pair])
        elif self._parted:
            self._clean[row] = note
        if not around and seen.count[pair] >= roundoff.MANY:
            self._recent.append(note)
            clean = self._clean.get(row, note)
            self._recent_clean.append(clean)
            self._last = clean if clean != NONE else self._last

    def _coarsest(self, pair: int, row: int, inputs: Sequence[Operand], kept: Sequence[Operand]) -> float:
        """Half a unit of what a row was computed in: gradients of parameters in float32 are made by calls with fewer bits (autocast)."""
        operands = (*inputs, *kept) if self._role[row] == PARAMETERS_GRAD else ()
        found: float = max((self.seen.unit[pair], *(one.unit for one in operands)))
        return found

    def _note(self, pair: int, api: str | None, inputs: Sequence[Operand], kept: Sequence[Operand], carried: Carried, new: float) -> Noise:
        """What a result hands on: what was seen or came in. Gains are not compounded, and what the statistics show bounds it."""
        seen = self.seen
        same = not seen.moved(pair) and seen.count[pair] >= roundoff.MANY and carried.absolute is None
        if same or not (carried.element or carried.whole or seen.moved(pair)):
            return NONE
        if seen.other[pair]:
            return Noise(1.0, 1.0, seen.rms[pair])
        keeps = api is not None and (api in traits.ADDITIONS or api in traits.MASKINGS or api in traits.LOSSES or traits.is_softmax(api))
        came_in = carried.element
        if not keeps and seen.count[pair] > 1:
            came_in = max((one.noise.element for one in (*inputs, *kept)), default=0.0)
        element = max(seen.element[pair], seen.elements[pair], came_in, new)
        if seen.count[pair] >= roundoff.MANY and carried.absolute is None:
            coarse = self._coarse.get(self._walker.rows[pair][0], seen.unit[pair])  # a single element moves by no less
            evidence = max(roundoff.EVIDENCE * seen.largest(pair), new, coarse)
            element = max(seen.element[pair], seen.elements[pair], min(element, evidence))
        element = min(1.0, element)
        whole = min(1.0, max(seen.norm[pair], seen.mean[pair], element * seen.share[pair]))
        return Noise(element, whole, element * seen.rms[pair] if carried.absolute is None else carried.absolute)

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

    def _exact(self, pair: int, inputs: Sequence[Operand]) -> None:
        """Integers, and tensors of zeros: other ones are a difference, unless they were made of numbers with noise."""
        distance = float(self._walker.measured.distance[pair])
        if not distance:
            return
        noise = max((one.noise.element for one in inputs), default=0.0)
        row = self._walker.rows[pair][0]
        known = noise and distance <= roundoff.GROWTH * noise
        self.ratio[pair] = self.alone[pair] = 0.0 if known else roundoff.times_exact(distance)
        if not self.seen.unit[pair]:
            self._notes[row] = _UNKNOWN


def _largest(notes: Iterator[Noise] | Sequence[Noise] | deque[Noise]) -> Noise:
    element = whole = absolute = 0.0
    for note in notes:
        element, whole, absolute = max(element, note.element), max(whole, note.whole), max(absolute, note.absolute)
    return Noise(element, whole, absolute)


def _of_others(result: Result) -> Operand:
    """Elements that have nothing to do with those of the other side."""
    return Operand(Noise(1.0, 1.0, result.rms), result.rms, 0.0, 1.0, result.size, result.size, result.unit)


def _hands_on(api: str) -> bool:
    """What comes out are elements of what went in."""
    return api in traits.MOVES or api in traits.HANDS_ON or api in traits.MASKINGS


def _sized(operand: Operand, result: Result) -> Operand:
    """A tensor of which no number is known is taken to be as large as what comes out."""
    return operand if operand.rms else operand._replace(rms=result.rms, size=result.size)


def _grown(noise: Noise, unit: float, gain: float = propagation.MODULE_GAIN) -> Noise:
    """Through something of which nothing is known, and that rounds a few times."""
    new = _ROUNDINGS * roundoff.fresh(unit)
    element = min(roundoff.JUDGED, max(gain * noise.element, new))
    return Noise(element, min(roundoff.JUDGED, gain * noise.whole + roundoff.BIAS * new), gain * noise.absolute)
