"""What round-off explains of a difference, record after record: noise is carried from the calls that make tensors to those that use them.

Each pair of rows gets a number, the largest of what its statistics say: how many times what round-off may do. Above 1 it is a difference
that has to begin somewhere. There are two of them: `ratio` takes for granted whatever goes in, so that it is large only where something
begins; `alone` takes only what round-off makes of it, so that it stays large behind a fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msprobe_engine.align.parallel.parameter_owner import owner_of
from msprobe_engine.core import operator_traits as traits
from msprobe_engine.find.difference.harmless import memory
from msprobe_engine.find.difference.noise.incoming import IncomingNoise
from msprobe_engine.find.difference.noise.notes import grow_noise, hands_on, largest
from msprobe_engine.find.difference.paired_rank import PairedRank
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD
from msprobe_engine.measure import propagation, roundoff
from msprobe_engine.measure.propagation import NONE, Carried, Noise, Operand, Result

_KEEP_ELEMENTS = traits.ELEMENTWISE | traits.SCALINGS | traits.MOVES | traits.HANDS_ON
"""Calls of which each element is made of one element, which moves by no less than a unit of the dtype it came through."""

_UNKNOWN = Noise(1.0, 1.0, 0.0)


class CarriedNoise(IncomingNoise):
    """Goes over the records of one rank of one step, in the order of execution; see `NoiseNotes` for what it is given and holds."""

    def judge_pair(self, position: int) -> None:
        """Judge the next pair of records, and note what it hands on."""
        walker, seen = self._walker, self.seen
        span = range(walker.starts[position], walker.starts[position + 1])
        if self.quiet and not any(seen.has_difference(pair) or (seen.blank[pair] and seen.unit[pair]) for pair in span):
            return
        self.quiet = False
        op = walker.structure.pairs[position][0]
        kind = walker.target.kinds[op]
        gradients = walker.target.gradients[op]
        backward = gradients or kind[0] == "backward"
        self._later |= backward
        limit = roundoff.LATER if self._later else roundoff.FORWARD
        api = kind[2] if len(kind) == 3 else None
        taken = [pair for pair in span if self._role[walker.rows[pair][0]] in (INPUT, PARAMETERS)]
        if api is not None and not backward:
            taken = [pair for pair in taken if not memory.is_destination(walker, walker.rows[pair][0])]
        going_in = [self._going_in(pair, limit) for pair in taken]
        inputs, clean = ([operands[k] for operands in going_in if operands is not None] for k in (0, 1))
        biases = [self._is_bias(pair) for pair, operands in zip(taken, going_in) if operands is not None] if api is None else []
        kept, kept_clean = self._behind(position, inputs, clean) if backward else ([], [])
        coarse = max(map(self._came_through, taken), default=0.0) if api in _KEEP_ELEMENTS and not backward else 0.0
        if not inputs and api is not None and backward:  # what came back was written into a view, and no record shows it
            inputs, clean = ([Operand(one, 0.0, 0.0, 1.0, 1, 1, 0.0)] for one in (self._recent.largest, self._recent_clean.largest))
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
                exact = api is not None and not backward and (api in traits.LOOKUPS or hands_on(api))
                unit = 0.0 if exact else self._coarsest(pair, row, inputs, kept)
                self._notes[row], self._clean[row] = (grow_noise(largest(one.noise for one in some), unit, 1.0) for some in (inputs, clean))
                if self._later:  # gradients are summed in buffers that no record leads to
                    self._recent.append(self._notes[row])
                    self._recent_clean.append(self._clean[row])
                if gradients:
                    self._note_gradient(row)
                continue
            if not seen.unit[pair] or not seen.rms[pair]:
                self._exact(pair, inputs, taken)
                continue
            result = Result(seen.rms[pair] / self._added_up(op, api, inputs), seen.count[pair], seen.unit[pair])
            if blank:
                inputs, clean, kept, kept_clean = (
                    [_fill_in_size(one, result) for one in some] for some in (inputs, clean, kept, kept_clean)
                )
            if any(biases) and not backward:
                inputs, clean = ([_added(one, result) if bias else one for one, bias in zip(some, biases)] for some in (inputs, clean))
            if api in traits.BY_INDEX and not backward and any(map(self._chosen_otherwise, taken)):
                inputs, clean = ([*some, _of_others(result)] for some in (inputs, clean))
            carried = self._propagate_noise(api, backward, gradients, inputs, kept, result, inside, self._notes)
            bare = (
                carried
                if not self._parted
                else self._propagate_noise(api, backward, gradients, clean, kept_clean, result, inside, self._clean)
            )
            if coarse > seen.unit[pair]:
                self._coarse[row] = coarse
            self._judge(pair, api, limit, inputs, kept, carried, bare, inside)
            if gradients:
                self._note_gradient(row)

    def _is_bias(self, pair: int) -> bool:
        """A parameter that a module adds to what it computes."""
        row = self._walker.rows[pair][0]
        return self._role[row] == PARAMETERS and self._walker.side.name[row].endswith(".bias")

    def _added_up(self, op: int, api: str | None, inputs: Sequence[Operand]) -> float:
        """Of so many tokens a loss is the sum; 1 of what is none."""
        side = self._walker.side
        if api not in traits.LOSSES_OF_CLASSES or not any(side.values.get(row) == "sum" for row in side.rows(op)):
            return 1.0
        return max((operand.size / max(operand.last, 1) for operand in inputs), default=1.0)

    def parameters_of_zeros(self, then: PairedRank) -> dict[bytes, Noise]:
        """Numbers of parameters that were zero in this step -> what noise of their gradients has made of them in the next one."""
        golden = self._walker.golden.side
        zeros = {golden.name[row] for row, role in enumerate(golden.role) if role == PARAMETERS and golden.stats[row][3] == 0}
        side, kinds, names = then.side, then.target.kinds, then.golden.side.name
        return {
            side.stats[row].tobytes(): self.update_of_zeros(owner_of(side, row, kinds[side.op[row]]))
            for row, other in then.rows
            if names[other] in zeros
        }

    def _propagate_noise(
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
            carried = Carried(0.0, 0.0)
        elif not any(operand.noise.element or operand.noise.whole for operand in (*inputs, *kept)):
            exact = api is not None and not backward and hands_on(api)
            carried = Carried(0.0, 0.0, not exact or result.unit > min(operand.unit for operand in inputs))
        elif backward:
            carried = propagation.backward(api, inputs, kept, result, gradients or api is None)
        elif api is None:
            carried = propagation.through_module(inputs)
        else:
            carried = propagation.forward(api, inputs, result, self._start is not None)
        if not inside:
            return carried
        within = largest(self._inside(inside, notes))
        return carried._replace(element=max(carried.element, within.element), whole=max(carried.whole, within.whole))

    def _inside(self, calls: Sequence[int], notes: dict[int, Noise]) -> Iterator[Noise]:
        """Noise of what the calls directly inside of a module give out."""
        side = self._walker.side
        for op in calls:
            yield from (notes[row] for row in side.rows(op) if row in notes)

    def _judge(
        self, pair: int, api: str | None, limit: float, inputs: Sequence[Operand], kept: Sequence[Operand], carried: Carried, bare: Carried,
        inside: Sequence[int],
    ) -> None:  # fmt: skip
        walker, seen = self._walker, self.seen
        row, _ = walker.rows[pair]
        unit = self._coarsest(pair, row, inputs, kept)
        if api is None and not inside:  # of what a module has computed in nothing is known
            unit = max(unit, self._of_activations)
        new = roundoff.fresh(unit, max((operand.last for operand in inputs), default=1)) if carried.rounds else 0.0
        if self._products and roundoff.is_wide_product(walker.side.ops[walker.side.op[row]], walker.side.dtype[row]):
            new = max(new, self._products)
        foreign = walker.foreign.get(walker.side.op[row], 0.0)
        bias = (
            roundoff.BIAS_OF_SUMS if api is not None and (api in traits.ADDITIONS or traits.sums_products(api)) else roundoff.BIAS
        ) * new
        element = math.hypot(carried.element, new)
        whole = carried.whole
        if foreign:
            element, whole = max(element, foreign), max(whole, foreign)
        excused = float(walker.cancelled.excused[pair])
        if excused:
            element, whole = max(element, excused), max(whole, excused)
        behind = max((operand.noise.element for operand in inputs), default=0.0) if carried.absolute is not None else 0.0
        self.sharp[pair] = element <= roundoff.JUDGED
        if self.sharp[pair]:
            self.ratio[pair] = self._times(pair, element, whole, bias, limit, behind)
            self.least[pair] = self._smallest_factor(pair, element, whole, bias, limit)
        else:  # as much noise as can be judged makes a smaller difference, or does not
            most = min(whole, roundoff.JUDGED * seen.share[pair])
            self.judged[pair] = self._times(pair, roundoff.JUDGED, most, bias, limit, behind) <= 1
            self.least[pair] = math.inf
        if not self._parted:
            self.alone[pair] = self.ratio[pair]
        else:
            self.alone[pair] = self._times(pair, math.hypot(bare.element, new), bare.whole, bias, limit, behind)
        note = self._compute_output_noise(pair, api, inputs, kept, carried, new, inside)
        self._notes[row] = note
        if self.alone[pair] <= 1 and not seen.other[pair]:
            self._shown.append(max(seen.norm[pair], seen.mean[pair]))
        if self.alone[pair] > 1:
            self._parted = True
            explained = min(1.0, math.hypot(bare.element, new))
            self._clean[row] = Noise(explained, min(1.0, bare.whole + explained * seen.share[pair]), explained * seen.rms[pair])
        elif self._parted:
            self._clean[row] = note
        if not inside and seen.count[pair] >= roundoff.MANY:
            self._recent.append(note)
            clean = self._clean.get(row, note)
            self._recent_clean.append(clean)
            self._last = clean if clean != NONE else self._last

    def _coarsest(self, pair: int, row: int, inputs: Sequence[Operand], kept: Sequence[Operand]) -> float:
        """Half a unit of what a row was computed in: gradients of parameters in float32 are made by calls with fewer bits (autocast)."""
        kind = self._walker.target.kinds[self._walker.side.op[row]]
        of_weight = self._role[row] == PARAMETERS_GRAD or (len(kind) == 3 and kind[0] == "backward" and traits.multiplies_inside(kind[2]))
        operands = (*inputs, *kept) if of_weight else ()
        coarsest: float = max((self.seen.unit[pair], *(operand.unit for operand in operands)))
        return coarsest

    def _compute_output_noise(
        self,
        pair: int,
        api: str | None,
        inputs: Sequence[Operand],
        kept: Sequence[Operand],
        carried: Carried,
        new: float,
        inside: Sequence[int],
    ) -> Noise:
        """What a result hands on: what was seen or came in. Gains are not compounded, and what the statistics show bounds it."""
        seen = self.seen
        same = not seen.has_difference(pair) and seen.count[pair] >= roundoff.MANY and carried.absolute is None
        if same or not (carried.element or carried.whole or seen.has_difference(pair)):
            return NONE
        if seen.other[pair]:
            return Noise(1.0, 1.0, seen.rms[pair])
        keeps = api is not None and (api in traits.ADDITIONS or api in traits.MASKINGS or api in traits.LOSSES or traits.is_softmax(api))
        came_in = carried.element
        if not keeps and seen.count[pair] > 1:
            came_in = max(
                (noise.element for noise in (*(operand.noise for operand in (*inputs, *kept)), *self._inside(inside, self._notes))),
                default=0.0,
            )
        element = max(seen.element[pair], seen.elements[pair], came_in, new)
        if seen.count[pair] >= roundoff.MANY and carried.absolute is None:
            coarse = self._coarse.get(self._walker.rows[pair][0], seen.unit[pair])  # a single element moves by no less
            evidence = max(roundoff.EVIDENCE * seen.largest(pair), new, coarse)
            element = max(seen.element[pair], seen.elements[pair], min(element, evidence))
        element = min(1.0, element)
        whole = min(1.0, max(seen.norm[pair], seen.mean[pair], element * seen.share[pair]))
        return Noise(element, whole, element * seen.rms[pair] if carried.absolute is None else carried.absolute)

    def _exact(self, pair: int, inputs: Sequence[Operand], taken: Sequence[int]) -> None:
        """Integers, and tensors of zeros: other ones are a difference, unless they were made of numbers with noise, or of integers that
        noise has made others (which tokens went to an expert), also where these show it in no statistic (a map of experts has as many true
        elements). `taken`: what goes in."""
        noise = max((operand.noise.element for operand in inputs), default=0.0)
        row = self._walker.rows[pair][0]
        noise = max((noise, *map(self._noise_of_choice, taken)))
        if noise and not self.seen.unit[pair]:
            self._choices[row] = noise
        distance = float(self._walker.measured.distance[pair])
        if not distance:
            return
        known = (noise and distance <= roundoff.GROWTH * noise) or any(map(self._chosen_otherwise, taken))
        self.ratio[pair] = self.alone[pair] = 0.0 if known else roundoff.times_exact(distance)
        if not self.seen.unit[pair]:
            self._notes[row] = _UNKNOWN


def _of_others(result: Result) -> Operand:
    """Elements that have nothing to do with those of the other side."""
    return Operand(Noise(1.0, 1.0, result.rms), result.rms, 0.0, 1.0, result.size, result.size, result.unit)


def _added(operand: Operand, result: Result) -> Operand:
    """What is added has as much noise in the result as it has of its size."""
    part, noise = min(1.0, operand.rms / result.rms), operand.noise
    return operand._replace(noise=noise._replace(element=part * noise.element, whole=part * noise.whole), rms=result.rms)


def _fill_in_size(operand: Operand, result: Result) -> Operand:
    """A tensor of which no number is known is taken to be as large as what comes out."""
    return operand if operand.rms else operand._replace(rms=result.rms, size=result.size)
