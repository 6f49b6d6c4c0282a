"""Where a difference between two runs begins, in one rank of one step.

The records are walked in the order in which the calls ended. A record is an origin when its result is off although what went into it
is not:

* its outputs differ by more than round-off, its inputs and parameters do not (or by far less);
* it takes in something that differs and that no earlier record has made: data, a parameter, a buffer, something written in place, or the
  output of a call that only one side has;
* it makes NaN or Inf of finite inputs, and the golden side does not;
* it was called with another argument.

What lies behind an origin differs because of it, and is not one. What round-off amounts to on its way
through a network is carried along (`noise.carried`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from msprobe_engine.align.calls.alignment import are_of_different_frameworks
from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.core.operator_traits import UNINITIALISED
from msprobe_engine.find.difference import attribution
from msprobe_engine.find.difference.harmless import bookkeeping, left_out, loss_scale, memory, repeated, same_result
from msprobe_engine.find.difference.noise.carried import CarriedNoise
from msprobe_engine.find.difference.optimizer import cancelling_gradients, lone_updates
from msprobe_engine.find.difference.paired_rank import PairedRank
from msprobe_engine.find.origin import ARGUMENT, DEFAULT, GRADIENT, NONFINITE, PARAMETER, RESULT, TAKEN, DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD
from msprobe_engine.measure import distances, factorize, saved_tensors
from msprobe_engine.measure.distances import Floats
from msprobe_engine.measure.factorize import Bools
from msprobe_engine.measure.propagation import NONE, Noise
from msprobe_engine.measure.segments import RecordSums, SegmentReduce
from msprobe_engine.measure.tensors.metrics import Figures


@dataclass
class Walk:
    """Outcome of one rank of one step.

    Attributes:
        origins: in order of execution.
        aside: likewise, differences that are no place where one begins (`DifferenceWalk.walk`): the finding where there is no origin.
        differing: records whose outputs differ, consequences too.
        compared: records whose outputs could be compared.
        largest: largest accepted distance: what round-off amounted to; largest_at: the pair of rows, -1 for none.
        unjudged: records that are round-off themselves, and differ by so much that no fault can be told from it.
        cancelled: those of them that are gradients which come to nothing, or were made of one: they have no number that could be wrong.
        blurred: records whose noise is as large, whatever they differ by.
        least: of each result that round-off may move, the smallest factor (beyond 1) that is told from it (`noise.notes`).
        end: noise of the last records.
    """

    origins: list[DifferenceOrigin] = field(default_factory=list)
    aside: list[DifferenceOrigin] = field(default_factory=list)
    differing: int = 0
    compared: int = 0
    largest: float = 0.0
    largest_at: int = -1
    unjudged: int = 0
    cancelled: int = 0
    blurred: int = 0
    least: Floats = field(default_factory=lambda: np.zeros(0))
    end: Noise = NONE


class DifferenceWalk(PairedRank):
    """Looks for origins in one rank of one step.

    Args:
        target, golden, structure: as of `PairedRank`.
        measured: pair of rows -> what was measured of its saved tensors; None: they are read here.
    """

    def __init__(self, target: Tree, golden: Tree, structure: Structure, measured: Mapping[tuple[int, int], Figures] | None = None) -> None:
        super().__init__(target, golden, structure)
        self._carried: CarriedNoise | None = None
        self.scale = loss_scale.scale_ratio(self)
        if self.scale != 1.0:
            self.target = loss_scale.without_scale(self, self.scale)
            self.side = self.target.side
        self.measured = distances.distances(self.side, golden.side, self.rows)
        saved_tensors.refine(self.measured, self.side, golden.side, self.rows, measured)
        left_out.results_of_one_side(self)
        left_out.buckets(self)
        left_out.shares_of_gradients(self)
        left_out.masks_of_scores(self)
        if self.extra or self.missing:
            left_out.finished_by_other_calls(self)
            repeated.leave_out_repeated(self)
        memory.unwritten_memory(self)
        self.so_far = left_out.sums_so_far(self)
        self.cancelled = cancelling_gradients.detect_cancelling(self)

    def carry_over_step(self, before: DifferenceWalk) -> None:
        """Parameters whose gradients came to nothing in the step before may be others now, and vectors that it has moved by a small part of
        that."""
        if before.cancelled.parameters or before.cancelled.vectors:
            cancelling_gradients.carry_over(self, before.cancelled)
        self.other_update = before.updates_otherwise
        self.lone_updates = lone_updates.find_lone_updates(self, before)
        if before._carried is not None:
            self.updated = before._carried.parameters_of_zeros(self) | before._carried.updated
        cancelling_gradients.tolerate_update(self, before)

    def walk(self, floor: float = 0.0, start: Noise | None = None) -> Walk:
        """Find the origins.

        What goes into a module whose calls were recorded, or gives its form only, is no origin where the result is the same, nor is a view
        that calls of one side take in: a difference there is put aside.

        Args:
            floor: distances up to it are round-off whatever the dtype says (a noisier kind of arithmetic).
            start: noise at the end of the step before, whose weights this one begins with; None: there was none.
        """
        result = Walk()
        records = self._records()
        carried = self._carried = CarriedNoise(self, start, floor)
        made = [0.0] * len(self.side.ops)  # distance of what each record gave out, or holds inside
        result.compared = int((records.known & records.counts).sum())
        inner, outer, moved = records.inner.tolist(), records.outer.tolist(), records.moved.tolist()
        parents = self.target.parents
        for position in self.order[records.counts[self.order]].tolist():
            carried.judge_pair(position)
            op, golden_op = self.structure.pairs[position]
            if not moved[position] and not (records.argument[position] >= 0 and attribution.changes_places(self, op)):
                continue
            origin = self._judge_call(op, golden_op, position, records, made, not result.origins)
            used = origin is None or origin.kind not in (RESULT, ARGUMENT, TAKEN) or not attribution.for_own_use(self, op, golden_op)
            if origin is not None and (origin.aside or not used):
                result.aside.append(origin)
            elif origin is not None:
                result.origins.append(origin)
            given, taken, worst = outer[position], inner[position], int(records.worst_out[position])
            result.blurred += bool(given) and not carried.sharp[worst] and not self.is_off(op)
            if self.is_off(op):
                result.differing += 1
            elif given and not carried.judged[worst]:
                result.unjudged += 1
                result.cancelled += self._comes_to_nothing(position, worst)
            elif result.largest < given < np.inf:
                result.largest, result.largest_at = given, worst
            made[op] = max(made[op], given, records.excused[position])
            parent, inside = parents[op], max(given, taken if taken < np.inf else 0.0)
            while parent >= 0:
                made[parent] = max(made[parent], inside)
                parent = parents[parent]
        result.end = carried.end
        result.least = carried.smallest_factors()
        result.origins, result.aside = (
            [
                kept_origin
                for kept_origin in some
                if kept_origin.kind not in (TAKEN, RESULT, ARGUMENT) or not bookkeeping.comes_to_nothing(self, kept_origin.op)
            ]
            for some in (result.origins, result.aside)
        )
        for origin in result.origins:
            self.blame_unmatched(origin)
        return result

    def _records(self) -> RecordSums:
        """What each pair of records takes in and gives out, from the distances as they are now."""
        m, rows = self.measured, factorize.columns(self.rows)[0]
        role = np.frombuffer(bytes(self.side.role), np.uint8)[rows]
        out = (role == OUTPUT) | (role == PARAMETERS_GRAD)
        sums = SegmentReduce(self.starts)
        given = np.where(out, m.distance, 0.0)
        outer, excused = sums.largest(given), sums.largest(self.cancelled.excused)
        return RecordSums(
            sums.largest(np.where(out | m.argument, 0.0, m.distance)),
            outer,
            sums.place_of(outer, given),
            sums.first(out & m.bad_target & ~m.bad_golden),
            sums.first(~out & m.argument),
            sums.any(~out & m.bad_target),
            sums.any(out & m.known),
            self.counted,
            np.maximum(self._behind(sums.largest(m.distance), sums.largest(np.where(role == INPUT, m.distance, 0.0))), excused).tolist(),
            (excused if are_of_different_frameworks(self.side, self.golden.side) else np.zeros(len(excused))).tolist(),
        )

    @cached_property
    def counted(self) -> Bools:
        """Pairs of records that are looked at: those whose result is defined."""
        ops = self.side.ops
        counted = (not (_empty(ops[op]) or memory.is_written_over(self, op)) for op, _ in self.structure.pairs)
        return np.fromiter(counted, bool, len(self.structure.pairs))

    @property
    def carried(self) -> CarriedNoise:
        """What round-off explains, as the last walk has found it; of a first step where nothing was walked."""
        if self._carried is None:
            self.walk()
            assert self._carried is not None
        return self._carried

    def forget(self) -> None:
        """Let go of what is found again when it is asked for: runs of many ranks have many walks."""
        self.__dict__.pop("owners", None)
        if self._carried is not None:
            self._carried.forget()

    def _behind(self, whole: Floats, inputs: Floats) -> Floats:
        """Per pair of records the largest value behind it. A result is made of more than its record says: parameter gradients of what
        the module's calls took in, other gradients of what the forward call took in and gave out, which autograd has kept.

        Args:
            whole, inputs: the largest value of each pair of records, over all its rows and over its inputs.
        """
        behind = np.zeros(len(whole))
        own, twins, members, groups = self.kept
        behind[own] = whole[twins]
        np.maximum.at(behind, groups, inputs[members])
        return behind

    def _judge_call(
        self, op: int, golden_op: int, position: int, records: RecordSums, made: Sequence[float], clean: bool
    ) -> DifferenceOrigin | None:
        side, ratio = self.side, self.carried.ratio
        span = range(self.starts[position], self.starts[position + 1])
        explained = max(0.0, made[op], records.behind[position])
        for row, _ in self.rows[self.starts[position] : self.starts[position + 1]]:
            source = self.target.producers.get(row)
            if source is not None and made[source] > explained:
                explained = made[source]
        inside, aside = max(float(records.inner[position]), explained, self.foreign.get(op, 0.0)), None
        argument = int(records.argument[position])
        argument = -1 if argument in self.carried.explained else argument
        worst_in, worst_out = self._worst(span, False), self._worst(span, True)
        part = memory.gives_part(self, op)
        if records.bad_out[position] >= 0 and not records.bad_in[position] and not np.isinf(explained) and not part:
            return self._origin(op, golden_op, NONFINITE, int(records.bad_out[position]), float(records.inner[position]))
        comes_off = worst_out >= 0 and ratio[worst_out] > 1
        off = clean and worst_in >= 0 and ratio[worst_in] > 1
        off = off and not (part and memory.gives_less(self, op) and not self.is_off(op))  # the rest of a buffer goes nowhere
        if off and same_result.for_nothing(self, op, worst_in, bool(records.known[position]), self.is_off(op)):
            if (worst := same_result.worst(self, op)) >= 0:
                aside = self._origin(op, golden_op, TAKEN, worst, 0.0)
                aside.aside = True
        elif off:
            kind = PARAMETER if side.role[self.rows[worst_in][0]] == PARAMETERS else TAKEN
            made_here = self.target.producers.get(self.rows[worst_in][0]) in self.extra
            if argument >= 0 and not made_here:  # the step before was called with it too, and left what is taken in (running statistics)
                return self._origin(op, golden_op, ARGUMENT, argument, 0.0, worst_in)
            return self._origin(op, golden_op, kind, worst_in, 0.0)
        same_bits_in = self.one_program and not inside and float(records.outer[position]) > 0
        by_argument = comes_off or same_bits_in or (argument >= 0 and attribution.changes_places(self, op))
        if argument >= 0 and by_argument:
            return self._origin(op, golden_op, ARGUMENT, argument, float(records.inner[position]), worst_out)
        if same_bits_in and op in self.lone_arguments:
            return self._origin(op, golden_op, DEFAULT, int(records.worst_out[position]), 0.0)
        if comes_off and not np.isinf(inside):
            if memory.hands_on(self, op) and records.inner[position] >= self.measured.distance[worst_out]:
                return aside  # what went in comes out
            if ratio[worst_out] <= cancelling_gradients.steepness(self, op):
                return aside
            kind = GRADIENT if side.role[self.rows[worst_out][0]] == PARAMETERS_GRAD else RESULT
            return self._origin(op, golden_op, kind, worst_out, inside)
        return aside

    def _comes_to_nothing(self, position: int, worst: int) -> bool:
        """A result is a gradient whose terms cancel, or was made of one: of a tensor of as many elements that is one."""
        shape, excused = self.side.shape, self.cancelled.excused
        made = shape[self.rows[worst][0]]
        span = range(self.starts[position], self.starts[position + 1])
        return any(excused[pair] and shape[self.rows[pair][0]] == made for pair in (worst, *span))

    def _worst(self, span: range, given: bool) -> int:
        """The pair of rows that is most off, of what comes out or of the tensors that go in; -1: nothing is."""
        role, rows, ratio, argument = self.side.role, self.rows, self.carried.ratio, self.measured.argument
        chosen = (
            k for k in span if (role[rows[k][0]] in (OUTPUT, PARAMETERS_GRAD)) is given and ratio[k] > 0 and (given or not argument[k])
        )
        return max(chosen, key=ratio.__getitem__, default=-1)

    def blame_unmatched(self, origin: DifferenceOrigin) -> None:
        """What takes in the output of a call that only one side has: that call is the origin."""
        attribution.attribute_to_unmatched_call(self, origin)
        attribution.without_gradient(self, origin)


def _empty(name: str) -> bool:
    """Calls whose result is not defined (memory without values)."""
    return name.count(".") > 1 and name.split(".", 2)[1] in UNINITIALISED
