"""What goes into a record: the noise that its inputs bear, and whether they differ by more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from msprobe_engine.core import operator_traits as traits
from msprobe_engine.core.dtypes import is_bool
from msprobe_engine.core.names import backward_twin, forward_twin
from msprobe_engine.find.difference.harmless import bridges, same_result
from msprobe_engine.find.difference.noise.notes import NoiseNotes, grow_noise, largest
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS
from msprobe_engine.measure import propagation, roundoff
from msprobe_engine.measure.propagation import NONE, Noise, Operand

_OF_NORMS = 2.0
"""So many times what statistics of single tensors show is round-off of a number that is made of many (their common norm)."""

_MUCH = 4.0
"""A factor explains a difference of which it leaves less than one in so many parts."""

_SIMPLE = (traits.ELEMENTWISE, traits.SCALINGS, traits.ADDITIONS, traits.MOVES, traits.HANDS_ON)
"""Calls, of one side only, that do to noise what is known."""


class IncomingNoise(NoiseNotes):
    """The inputs of records, see `NoiseNotes`."""

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
    def _of_activations(self) -> float:
        """Half a unit of the coarsest dtype of what modules give out, in the run that has the finer one: where no functions are recorded, a
        module may compute in it what it gives out in another (a bias in float32 is added to a product in 16 bits)."""
        trees = self._walker.target, self._walker.golden
        if any(len(kind) == 3 for tree in trees for kind in tree.kinds):
            return 0.0
        units = []
        for tree in trees:
            given = [dtype for dtype, role in zip(tree.side.dtype, tree.side.role) if role == OUTPUT]
            units.append(max((roundoff.eps(dtype) / 2 for dtype in set(given)), default=0.0))
        return min(units)

    @cached_property
    def _kept(self) -> dict[int, list[int]]:
        """Pair of records -> pairs of records whose tensors autograd has kept for it."""
        own, twins, members, groups = self._walker.kept
        kept: dict[int, list[int]] = {}
        for position, behind in (*zip(own.tolist(), twins.tolist()), *zip(groups.tolist(), members.tolist())):
            kept.setdefault(position, []).append(behind)
        return kept

    def _going_in(self, pair: int, limit: float) -> tuple[Operand, Operand] | None:
        """An input with its noise as it is, and as round-off explains it; None: no tensor of floating point numbers."""
        walker, seen = self._walker, self.seen
        row = walker.rows[pair][0]
        if walker.measured.argument[pair] and (number := self._number(pair)) is not None:
            return number, number
        if seen.other[pair] and same_result.has_another_form(walker, pair):  # says nothing of how far apart its numbers are
            self.ratio[pair] = self.alone[pair] = math.inf
            return None
        known = seen.rms[pair] or seen.other[pair] or seen.blank[pair]
        if not seen.unit[pair] or not known or walker.measured.argument[pair]:
            if not walker.measured.argument[pair] and walker.measured.distance[pair]:
                self._exact_input(pair, row)
            return None
        made = None if self._is_parameter_alone(pair) else self._find_producer_noise(row, self._rounded_on_the_way(pair))
        if made is not None and (left := self._beside_factor(pair)) is not None:
            made = left, left
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

    def _beside_factor(self, pair: int) -> Noise | None:
        """What is left of a difference beside the factor that a call of one side alone has put on a tensor (`bridges.scaled_by`): a factor
        is no round-off, however much of that there may be. None: there is no such call, or it does not explain the difference."""
        walker = self._walker
        row, golden_row = walker.rows[pair]
        factor = bridges.scaled_by(walker.target, row, walker.extra) / bridges.scaled_by(walker.golden, golden_row, walker.missing)
        norm, golden_norm = walker.side.stats[row][3], walker.golden.side.stats[golden_row][3] * factor
        if factor == 1.0 or not golden_norm > 0.0:
            return None
        apart = abs(float(norm / golden_norm) - 1.0)
        if not _MUCH * apart < abs(factor - 1.0):
            return None
        element = max(apart, self._came_through(pair))
        return Noise(element, apart, element * self.seen.rms[pair])

    def _is_parameter_alone(self, pair: int) -> bool:
        """A parameter that calls which do not belong together gave out: others have the same numbers (biases after one update)."""
        walker = self._walker
        row, golden_row = walker.rows[pair]
        target_source, golden_source = walker.target.producers.get(row), walker.golden.producers.get(golden_row)
        partner = -1 if golden_source is None else walker.back.get(golden_source, -1)
        return target_source is not None and target_source not in walker.extra and partner != target_source and walker.is_parameter(row)

    def _chosen_otherwise(self, pair: int) -> bool:
        """Whole numbers that are others because of noise in what they were made of: an expert takes other tokens."""
        return not self.seen.unit[pair] and float(self._walker.measured.distance[pair]) > 0 and self.alone[pair] <= 1

    def _noise_of_choice(self, pair: int) -> float:
        """Of the numbers that chose these integers, or truth values; 0 of others."""
        source = self._walker.target.producers.get(self._walker.rows[pair][0]) if self._choices and not self.seen.unit[pair] else None
        return 0.0 if source is None else max(self._choices.get(row, 0.0) for row in self._walker.side.rows(source))

    def _number(self, pair: int) -> Operand | None:
        """A Python number that differs by what round-off does to numbers that are made of tensors (a factor that clips gradients by their
        norm); None: it differs by more, or is no such number."""
        walker = self._walker
        other = walker.rows[pair][1]
        value, distance = walker.golden.side.values.get(other), float(walker.measured.distance[pair])
        known = max(self._shown, default=0.0)
        if not walker.one_layout:  # of other ranks' gradients, and of those that are parts of sums, no record shows it
            known = max(known, self._of_backward / math.sqrt(roundoff.MANY))
        if not isinstance(value, float) or distance > _OF_NORMS * known:
            return None
        self.explained.add(pair)
        return Operand(Noise(distance, distance, 0.0), abs(value), abs(value), 1.0, 1, 1, 0.0)

    def _judge_input(self, pair: int, noise: Noise, clean: Noise, limit: float) -> None:
        self.ratio[pair] = self._times(pair, noise.element, noise.whole, 0.0, limit)
        self.alone[pair] = self._times(pair, clean.element, clean.whole, 0.0, limit)
        self._parted |= self.alone[pair] > 1

    def _exact_input(self, pair: int, row: int) -> None:
        """Integers, and tensors of zeros: other ones begin somewhere, unless what made them has noise."""
        walker = self._walker
        source = walker.target.producers.get(row)
        if source is None or source in walker.extra or self._is_changed_since(pair, source):
            noise = self._recent.largest.element
            distance = float(walker.measured.distance[pair])
            number = isinstance(walker.side.values.get(row), float)  # made of tensors in float32 (a factor that clips)
            # a mask that is given is the same, or another
            allowed = 0.0 if is_bool(walker.side.dtype[row]) else roundoff.GROWTH * noise
            known = (noise and distance <= allowed) or (number and distance <= roundoff.FLOOR)
            self.ratio[pair] = self.alone[pair] = 0.0 if known else roundoff.times_exact(distance)

    def _is_changed_since(self, pair: int, source: int) -> bool:
        """Integers, or truth values, that are others than on the golden side, although the record that gave them out gave the same there: a
        call that the golden run alone makes has made others of them, or another rank than the first, whose calls say what comes from where.
        """
        walker = self._walker
        row, golden_row = walker.rows[pair]
        golden_source = walker.golden.producers.get(golden_row)
        made_by_both = walker.one_layout or (golden_source is not None and walker.back.get(golden_source) == source)
        made = walker.pair_of(self._row_of(source, row)) if made_by_both and not self.seen.unit[pair] else -1
        return made >= 0 and bool(walker.measured.known[made]) and not walker.measured.distance[made]

    def _operand(self, pair: int, noise: Noise) -> Operand:
        seen = self.seen
        return Operand(noise, seen.rms[pair], seen.average[pair], seen.share[pair], seen.count[pair], seen.last[pair], seen.unit[pair])

    def _find_producer_noise(self, row: int, unit: float, depth: int = 0) -> tuple[Noise, Noise] | None:
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
                return self._estimate_unrecorded_noise(unit)
            return self._notes.get(source, NONE), self._clean.get(source, self._notes.get(source, NONE))
        if depth >= bridges.MOST:
            return None
        side = walker.side
        known: list[tuple[Noise, Noise]] = []
        unknown: list[tuple[Noise, Noise]] = []
        for other in side.rows(op):
            if side.role[other] in (INPUT, PARAMETERS) and roundoff.eps(side.dtype[other]) > 0:
                found = self._find_producer_noise(other, unit, depth + 1) or self._of_parameter(other)
                (known if found else unknown).append(found or self._estimate_unrecorded_noise(unit, other))
        if not known and not unknown:
            return None
        kind = walker.target.kinds[op]
        simple = len(kind) == 3 and any(kind[2] in calls for calls in _SIMPLE)
        gain = 1.0 if depth else propagation.ELEMENTWISE_GAIN if simple else propagation.MODULE_GAIN
        # gains are not compounded: what is unknown has grown by one
        with_faults, clean = (
            largest((grow_noise(largest(noises[k] for noises in known), unit, gain), *(noises[k] for noises in unknown))) for k in (0, 1)
        )
        return with_faults, clean

    def _came_through(self, pair: int) -> float:
        """Half a unit that the elements of an input were rounded to on their way: of the coarsest dtype that they came through, on both
        sides where both tell."""
        known = self._units.get(pair)
        if known is None:
            known = self._units[pair] = max(self.seen.unit[pair], self._coarsest_before(pair))
        return known

    def _rounded_on_the_way(self, pair: int) -> float:
        """The same, 0 where one side alone has moved what comes in (cloned, viewed) and nothing on its way rounds."""
        walker = self._walker
        (row, golden_row), (target, golden) = walker.rows[pair], (walker.target, walker.golden)
        by_one = target.producers.get(row) in walker.extra
        rounds = not by_one or bridges.rounds(target, row, walker.extra) or bridges.rounds(golden, golden_row, walker.missing)
        return self._came_through(pair) if rounds else 0.0

    def _coarsest_before(self, pair: int) -> float:
        walker = self._walker
        row, golden_row = walker.rows[pair]
        target_source, golden_source = walker.target.producers.get(row), walker.golden.producers.get(golden_row)
        if target_source is not None and target_source not in walker.extra:
            return self._coarse.get(self._row_of(target_source, row), 0.0) if self._coarse else 0.0
        units = [] if target_source is None else [bridges.coarsest(walker.target, row, walker.extra) / 2]
        if golden_source is not None:
            through_twin = self._coarse.get(self._twin_given_out(row, golden_row), 0.0)
            units.append(max(bridges.coarsest(walker.golden, golden_row, walker.missing) / 2, through_twin))
        return min(units, default=0.0)

    def _row_of(self, op: int, row: int) -> int:
        """The output of a record whose numbers a row has, but for the last digit of its norm where it was put together from pieces; where
        none has them, one that has none any more, or the first."""
        source = self._sources.get(row)
        if source is None:
            source = self._sources[row] = self._find_row_of(op, row)
        return source

    def _find_row_of(self, op: int, row: int) -> int:
        side, numbers = self._walker.side, self._walker.side.stats[row]
        given = [other for other in side.rows(op) if side.role[other] == OUTPUT and side.dtype[other]]  # no gradient is no tensor
        for known in (slice(None), slice(2)):  # of pieces the extremes stay as they are
            for other in given:
                if side.stats[other][known].tobytes() == numbers[known].tobytes():
                    return other
        return next((other for other in given if side.shape[other] is None), given[0] if given else -1)

    def _of_parameter(self, row: int) -> tuple[Noise, Noise] | None:
        """Of a parameter that a call of the target alone takes in: it is compared where a module shows it."""
        if not self._walker.has_numbers_of_parameter(row):
            return None
        moved = NONE if self._start is None else _of_update(self._start)
        return moved, moved

    def _estimate_unrecorded_noise(self, unit: float, row: int = -1) -> tuple[Noise, Noise]:
        """Of what was made by something without a record, of what came before it. What an update takes in (`row`) are gradients, in their
        buffers, and what an optimizer has made of them before."""
        known = [(self._recent.largest, self._recent_clean.largest), *self._of_users(row)]
        noises = grow_noise(largest([noise for noise, _ in known]), unit), grow_noise(largest([noise for _, noise in known]), unit)
        walker = self._walker
        if row < 0 or self._of_gradients.get(None, NONE) == NONE or walker.side.op[row] <= walker.target.last_backward:
            return noises
        gradient = self._of_gradient(row)
        if self._start is None:
            return gradient, gradient
        return largest((noises[0], gradient)), largest((noises[1], gradient))

    def _of_users(self, row: int) -> Iterator[tuple[Noise, Noise]]:
        """What comes back into a call is the sum of the gradients that calls give out which took in its result: autograd adds them up."""
        walker, side = self._walker, self._walker.side
        op = side.op[row] if row >= 0 else -1
        if op < 0 or walker.target.kinds[op][0] != "backward":
            return
        for user in walker.users[0].get(walker.target.index.get(forward_twin(side.ops[op]), -1), ()):
            back = walker.target.index.get(backward_twin(side.ops[user]), -1)
            for given in side.rows(back) if 0 <= back < op else ():
                if given in self._notes and side.role[given] == OUTPUT:
                    yield self._notes[given], self._clean.get(given, self._notes[given])

    def _appears(self, pair: int, row: int, limit: float, bridged: tuple[Noise, Noise] | None) -> tuple[Noise, Noise]:
        """A tensor that no record of both sides has made: a parameter or data, or what code without a record makes, or calls of one side
        only (`bridged`: their noise)."""
        walker, seen = self._walker, self.seen
        if not (
            seen.has_difference(pair) or seen.blank[pair]
        ):  # statistics that are the same to the last bit are those of the same numbers
            return NONE, NONE
        leaf = bridged is None and (self._role[row] == PARAMETERS or walker.is_parameter(row))
        read = Noise(2 * seen.unit[pair], 0.0, 0.0)  # rounded another way when it was loaded
        unit = seen.unit[pair]
        if not walker.one_layout and walker.side.op[row] > walker.target.last_backward:
            unit = max(unit, self._of_backward)
        handed_on = None if bridged or leaf else self._handed_on(pair, unit)
        unknown = (read, read) if leaf and self._start is None else handed_on or self._estimate_unrecorded_noise(unit, -1 if leaf else row)
        noise, clean = bridged or unknown
        if leaf and self._start is not None:
            moved = _of_update(self._start)
            rounded = walker.other_update and pair not in walker.lone_updates
            noise = clean = largest((moved, Noise(seen.unit[pair] / 2, 0.0, 0.0))) if rounded else moved
        if bridged is None and (known := walker.updated.get(walker.side.stats[row].tobytes())) is not None:
            noise, clean = (known, known) if leaf else (largest((noise, known)), largest((clean, known)))
        if leaf and walker.side.dtype[row] != walker.golden.side.dtype[walker.rows[pair][1]]:  # one run shows the copy in float32
            noise, clean = (largest((one, Noise(seen.unit[pair], 0.0, 0.0))) for one in (noise, clean))
        excused = float(walker.cancelled.excused[pair])
        if excused:
            noise = clean = Noise(max(noise.element, excused), max(noise.whole, excused), 0.0)
        self._judge_input(pair, noise, clean, limit)
        if seen.blank[pair]:
            return noise, clean
        shared = max(seen.norm[pair], seen.mean[pair]) if not seen.other[pair] else 1.0
        element = min(1.0, max(seen.largest(pair), self._came_through(pair)))
        shown = Noise(element, min(1.0, shared), element * seen.rms[pair])
        if self.ratio[pair] > 1:
            return shown, Noise(clean.element, clean.whole, clean.element * seen.rms[pair])
        return shown, shown

    def _handed_on(self, pair: int, unit: float) -> tuple[Noise, Noise] | None:
        """Of what the golden side takes in as one of its records gave it out: the noise of that result, however the target comes to what it
        takes in. None: no record of both sides gave it out."""
        given = self._twin_given_out(*self._walker.rows[pair])
        if given < 0:
            return None
        note = self._notes.get(given, NONE)
        return grow_noise(note, unit, 1.0), grow_noise(self._clean.get(given, note), unit, 1.0)

    def _twin_given_out(self, row: int, golden_row: int) -> int:
        """What a record of both sides, before that of `row`, gave out, if on the golden side it has those numbers; else -1."""
        walker, golden = self._walker, self._walker.golden
        lost = golden.producers.get(golden_row)
        op = -1 if lost is None else walker.back.get(lost, -1)
        if not 0 <= op < walker.side.op[row]:
            return -1
        numbers = golden.side.stats[golden_row].tobytes()
        for pair in walker.span_of(op):
            given, golden_given = walker.rows[pair]
            if self._role[given] == OUTPUT and walker.measured.known[pair] and golden.side.stats[golden_given].tobytes() == numbers:
                return given
        return -1

    def _behind(self, position: int, inputs: list[Operand], clean: list[Operand]) -> tuple[list[Operand], list[Operand]]:
        """What autograd has kept of the way forward; gradients that a module's calls took in are added to what goes in."""
        walker, seen = self._walker, self.seen
        kept: list[Operand] = []
        kept_clean: list[Operand] = []
        for behind in self._kept.get(position, ()):
            op = walker.structure.pairs[behind][0]
            came_back = walker.target.kinds[op][0] == "backward"
            for pair in range(walker.starts[behind], walker.starts[behind + 1]):
                row = walker.rows[pair][0]
                visible = seen.visible[pair]
                if not seen.unit[pair] or not (visible or seen.blank[pair]) or walker.measured.argument[pair]:
                    continue
                given = self._role[row] == OUTPUT
                if given and came_back:
                    continue
                if given:
                    noise = self._notes.get(row, NONE)
                    clean_noise = self._clean.get(row, noise)
                else:
                    noise, clean_noise = self._find_producer_noise(row, seen.unit[pair]) or self._as_seen(pair)
                (inputs if came_back else kept).append(self._operand(pair, noise)._replace(rms=visible))
                (clean if came_back else kept_clean).append(self._operand(pair, clean_noise)._replace(rms=visible))
        return kept, kept_clean

    def _as_seen(self, pair: int) -> tuple[Noise, Noise]:
        seen = self.seen
        element = seen.largest(pair)
        shown = Noise(min(1.0, element), min(1.0, max(seen.norm[pair], seen.mean[pair])), element * seen.rms[pair])
        return shown, shown if self.alone[pair] <= 1 else NONE


def _of_update(start: Noise) -> Noise:
    """Noise of a parameter that the step before has moved by gradients with noise."""
    return Noise(min(roundoff.JUDGED, 3 * start.element), min(roundoff.JUDGED, 3 * start.whole), 0.0)
