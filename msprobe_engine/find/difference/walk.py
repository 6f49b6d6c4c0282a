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

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from msprobe_engine.align.calls.alignment import are_of_different_frameworks
from msprobe_engine.align.calls.call_tree import Tree, calls_function
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.align.parallel.parameter_owner import Mark, Owner, owners_and_tensors
from msprobe_engine.core.operator_traits import UNINITIALISED
from msprobe_engine.find.coverage import other_ways
from msprobe_engine.find.difference import attribution, kept_tensors, lone_arguments
from msprobe_engine.find.difference.harmless import bookkeeping, flat_buffers, left_out, loss_scale, same_result
from msprobe_engine.find.difference.lone_arguments import LoneArgument
from msprobe_engine.find.difference.noise.carried import CarriedNoise
from msprobe_engine.find.difference.optimizer import cancelling_gradients
from msprobe_engine.find.difference.origin import ARGUMENT, DEFAULT, GRADIENT, NONFINITE, PARAMETER, RESULT, TAKEN, DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import distances, factorize, saved_tensors
from msprobe_engine.measure.distances import Floats
from msprobe_engine.measure.factorize import Bools, Integers
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
    blurred: int = 0
    least: Floats = field(default_factory=lambda: np.zeros(0))
    end: Noise = NONE


class DifferenceWalk:
    """Looks for origins in one rank of one step.

    Args:
        target, golden: trees of both sides.
        structure: which record belongs to which.
        measured: pair of rows -> what was measured of its saved tensors; None: they are read here.

    Attributes:
        one_layout: both sides are cut alike.
        other_update: the parameters were moved by other calls in the step before.
        updated: numbers of what the update of the step before gave out -> its noise.
        one_program: both sides are of one framework and of one layout, so that the same bits make the same bits.
        so_far: pairs of rows that are parts of a sum, which the sides add up in different orders.
        finished: records of the target that make of a result what a single call of the golden side gives.
        scale: of the loss, as many times the golden run's; it is taken out.
        by_mean: rows of the target of which the mean alone was compared.
        foreign: record of the target -> largest distance of what other ranks put into the same collective.
    """

    one_layout = True
    by_mean: Set[int] = frozenset()
    other_update = False

    def __init__(self, target: Tree, golden: Tree, structure: Structure, measured: Mapping[tuple[int, int], Figures] | None = None) -> None:
        for without in (other_ways.without_updates, other_ways.without_other_code, flat_buffers.without_pieces):
            structure = without(structure, target, golden)
        self.target, self.golden, self.structure = target, golden, structure
        self.foreign: dict[int, float] = {}
        self.finished: set[int] = set()
        self.updated: dict[bytes, Noise] = {}
        self.one_program = not are_of_different_frameworks(target.side, golden.side)
        side: DumpTable = target.side
        self.side = side
        self.rows, self.starts = distances.paired_rows(side, golden.side, structure.pairs)
        self.scale = loss_scale.scale_ratio(self)
        if self.scale != 1.0:
            self.target = loss_scale.without_scale(self, self.scale)
            side = self.side = self.target.side
        self.measured = distances.distances(side, golden.side, self.rows)
        saved_tensors.refine(self.measured, side, golden.side, self.rows, measured)
        self.extra = set(structure.only_target)
        self.missing = set(structure.only_golden)
        self._position = {op: at for at, (op, _) in enumerate(structure.pairs)}
        self.back = {b: a for a, b in structure.pairs}
        self.moved = np.zeros(0)  # by which round-off was measured to move the rows of the golden side; it is accepted, too
        self._carried: CarriedNoise | None = None
        left_out.results_of_one_side(self)
        left_out.buckets(self)
        left_out.shares_of_gradients(self)
        if self.extra or self.missing:
            left_out.masks_of_scores(self)
            left_out.finished_by_other_calls(self)
        left_out.unwritten_memory(self)
        self.so_far = left_out.sums_so_far(self)
        self.cancelled = cancelling_gradients.detect_cancelling(self)

    def carry_over_step(self, before: DifferenceWalk) -> None:
        """Parameters whose gradients came to nothing in the step before may be others now, and vectors that it has moved by a small part of
        that."""
        if before.cancelled.parameters or before.cancelled.vectors:
            cancelling_gradients.carry_over(self, before.cancelled)
        self.other_update = before.updates_otherwise
        if before._carried is not None:
            self.updated = before._carried.parameters_of_zeros(self) | before._carried.updated
        cancelling_gradients.tolerate_update(self, before)

    @cached_property
    def updates_otherwise(self) -> bool:
        """The optimizers of the two sides make other calls (``foreach``, ``fused``), which round otherwise."""
        if not any(len(kind) == 3 for tree in (self.target, self.golden) for kind in tree.kinds):
            return True  # calls of functions were not recorded
        behind = self.target.last_backward, self.golden.last_backward
        return any(op > behind[0] for op in self.extra) and any(op > behind[1] for op in self.missing)

    @cached_property
    def owners(self) -> tuple[dict[int, Owner], dict[Mark, Owner | None]]:
        """Whose calls of the update, and whose tensors, those of the target are."""
        return owners_and_tensors(self.target)

    @cached_property
    def given(self) -> dict[bytes, list[int]]:
        """Numbers of a tensor -> rows of it that functions of the target only gave out, in order."""
        found: dict[bytes, list[int]] = {}
        for op in sorted(self.extra):
            if calls_function(self.target.kinds[op]):
                for row in self.side.rows(op):
                    if self.side.role[row] == OUTPUT:
                        found.setdefault(self.side.stats[row].tobytes(), []).append(row)
        return found

    @cached_property
    def gradients(self) -> dict[str, list[int]]:
        """Path of a module -> records of the gradients of its parameters, one of each micro batch."""
        found: dict[str, list[int]] = {}
        for op, gradients in enumerate(self.target.gradients):
            if gradients:
                found.setdefault(self.target.kinds[op][2], []).append(op)
        return found

    @cached_property
    def backward_calls(self) -> dict[str, list[int]]:
        """Path of a module -> records of the backward passes through it."""
        found: dict[str, list[int]] = {}
        for op, kind in enumerate(self.target.kinds):
            if len(kind) == 4 and kind[0] == "backward":
                found.setdefault(kind[2], []).append(op)
        return found

    @cached_property
    def lone_arguments(self) -> dict[int, LoneArgument]:
        """Record of the target -> an argument of its call that one side alone gives."""
        return lone_arguments.lone_arguments(self) if self.one_layout else {}

    @property
    def users(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """`Tree.users` of the target and of the golden side."""
        return self.target.users, self.golden.users

    def __getstate__(self) -> dict[str, Any]:
        """Pairs of rows go from one process to the other as an array: a tuple each would take many times as long."""
        return self.__dict__ | {"rows": np.stack(factorize.columns(self.rows))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.rows = list(zip(*state["rows"].tolist()))

    def span_of(self, op: int) -> range:
        """Positions of a record's pairs of rows; empty when nothing matches it."""
        at = self._position.get(op)
        return range(0) if at is None else range(self.starts[at], self.starts[at + 1])

    def span_of_twin(self, op: int) -> range:
        """`span_of` of the backward call of a forward call."""
        twin = self.target.twin(op)
        return range(0) if twin is None else self.span_of(twin)

    def position(self, op: int) -> int:
        """Position of a record among the pairs of records; -1 when nothing matches it."""
        return self._position.get(op, -1)

    def pair_of(self, row: int) -> int:
        """Position of the pair that a row of the target is in; -1 when it is in none."""
        return next((at for at in self.span_of(self.side.op[row]) if self.rows[at][0] == row), -1)

    def other_arguments(self) -> list[int]:
        """Rows that are arguments of another value than on the golden side."""
        return [self.rows[at][0] for at in np.flatnonzero(self.measured.argument).tolist()]

    def walk(self, floor: float = 0.0, start: Noise | None = None) -> Walk:
        """Find the origins.

        What goes into a module whose calls were recorded, or gives its form only, is no origin where the result is the same, nor is a view
        that calls of one side take in: a difference there is put aside.

        Args:
            floor: distances up to it are round-off whatever the dtype says (a noisier kind of arithmetic).
            start: noise at the end of the step before, whose weights this one begins with; None: there was none.
        """
        found = Walk()
        records = self._records()
        carried = self._carried = CarriedNoise(self, start, floor)
        made = [0.0] * len(self.side.ops)  # distance of what each record gave out, or holds inside
        found.compared = int((records.known & records.counts).sum())
        inner, outer, moved = records.inner.tolist(), records.outer.tolist(), records.moved.tolist()
        parents = self.target.parents
        for at in self.order[records.counts[self.order]].tolist():
            carried.judge_pair(at)
            op, other = self.structure.pairs[at]
            if not moved[at] and not (records.argument[at] >= 0 and attribution.changes_places(self, op)):
                continue
            origin = self._judge_call(op, other, at, records, made, not found.origins)
            used = origin is None or origin.kind not in (RESULT, ARGUMENT, TAKEN) or not attribution.for_own_use(self, op, other)
            if origin is not None and (origin.aside or not used):
                found.aside.append(origin)
            elif origin is not None:
                found.origins.append(origin)
            given, taken, worst = outer[at], inner[at], int(records.worst_out[at])
            found.blurred += bool(given) and not carried.sharp[worst] and not self.is_off(op)
            if self.is_off(op):
                found.differing += 1
            elif given and not carried.judged[worst]:
                found.unjudged += 1
            elif found.largest < given < np.inf:
                found.largest, found.largest_at = given, worst
            made[op] = max(made[op], given, records.excused[at])
            parent, inside = parents[op], max(given, taken if taken < np.inf else 0.0)
            while parent >= 0:
                made[parent] = max(made[parent], inside)
                parent = parents[parent]
        found.end = carried.end
        found.least = carried.smallest_factors()
        found.origins, found.aside = (
            [one for one in some if one.kind not in (TAKEN, RESULT, ARGUMENT) or not bookkeeping.comes_to_nothing(self, one.op)]
            for some in (found.origins, found.aside)
        )
        for origin in found.origins:
            self.blame_unmatched(origin)
        return found

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
        counted = (not (_empty(ops[op]) or left_out.is_written_over(self, op)) for op, _ in self.structure.pairs)
        return np.fromiter(counted, bool, len(self.structure.pairs))

    @cached_property
    def order(self) -> Integers:
        """Positions of pairs in the order of execution: parameter gradients stand where their module's backward pass ends."""
        tree = self.target
        place = np.fromiter((op for op, _ in self.structure.pairs), np.int64, len(self.structure.pairs))
        gradients = np.array(tree.gradients, bool)[place] if len(place) else np.zeros(0, bool)
        ops = place.copy()
        if gradients.any():
            ends = {kind[2]: i for i, kind in enumerate(tree.kinds) if len(kind) == 4 and kind[0] == "backward"}
            for at in np.flatnonzero(gradients).tolist():
                op = int(ops[at])
                place[at] = max(ends.get(tree.kinds[op][2], op), op)
        return np.lexsort((np.arange(len(ops)), ops, gradients, place))

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

    @property
    def calibrated(self) -> bool:
        """What round-off moves each row by was measured."""
        return len(self.moved) > 0

    @cached_property
    def _parameters(self) -> tuple[set[bytes], set[bytes]]:
        """Numbers of the parameters that modules show, of the target and of the golden side."""
        target, golden = (
            {side.stats[row].tobytes() for row in np.flatnonzero(np.frombuffer(bytes(side.role), np.uint8) == PARAMETERS).tolist()}
            for side in (self.side, self.golden.side)
        )
        return target, golden

    def is_parameter(self, row: int) -> bool:
        """A row of the target is a parameter that a function takes in: one that requires a gradient and no record has made, on one side at
        least (the other one may have changed it before)."""
        if not self.side.requires_grad[row] or not isinstance(self.side.shape[row], list):
            return False
        if not self._parameters[1]:  # no calls of modules, which would say so
            return self.target.takes_parameter(row)
        at = self.pair_of(row)
        rows = (self.side, row), (self.golden.side, self.rows[at][1])
        return at >= 0 and any(side.stats[one].tobytes() in known for (side, one), known in zip(rows, self._parameters))

    def has_numbers_of_parameter(self, row: int) -> bool:
        """A row of the target has the numbers of a parameter that a module shows."""
        return bool(self.side.requires_grad[row]) and self.side.stats[row].tobytes() in self._parameters[0]

    def _behind(self, whole: Floats, inputs: Floats) -> Floats:
        """Per pair of records the largest value behind it. A result is made of more than its record says: parameter gradients of what
        the module's calls took in, other gradients of what the forward call took in and gave out, which autograd has kept.

        Args:
            whole, inputs: the largest value of each pair of records, over all its rows and over its inputs.
        """
        found = np.zeros(len(whole))
        own, twins, members, groups = self.kept
        found[own] = whole[twins]
        np.maximum.at(found, groups, inputs[members])
        return found

    @cached_property
    def kept(self) -> tuple[Integers, Integers, Integers, Integers]:
        """`kept_tensors.of_pairs`."""
        return kept_tensors.of_pairs(self)

    def _judge_call(self, op: int, other: int, at: int, records: RecordSums, made: Sequence[float], clean: bool) -> DifferenceOrigin | None:
        side, ratio = self.side, self.carried.ratio
        span = range(self.starts[at], self.starts[at + 1])
        explained = max(0.0, made[op], records.behind[at])
        for row, _ in self.rows[self.starts[at] : self.starts[at + 1]]:
            source = self.target.producers.get(row)
            if source is not None and made[source] > explained:
                explained = made[source]
        inside, left = max(float(records.inner[at]), explained, self.foreign.get(op, 0.0)), None
        argument = int(records.argument[at])
        argument = -1 if argument in self.carried.explained else argument
        worst_in, worst_out = self._worst(span, False), self._worst(span, True)
        part = left_out.gives_part(self, op)
        if records.bad_out[at] >= 0 and not records.bad_in[at] and not np.isinf(explained) and not part:
            return self._origin(op, other, NONFINITE, int(records.bad_out[at]), float(records.inner[at]))
        comes_off = worst_out >= 0 and ratio[worst_out] > 1
        off = clean and worst_in >= 0 and ratio[worst_in] > 1
        off = off and not (part and left_out.gives_less(self, op) and not self.is_off(op))  # the rest of a buffer goes nowhere
        if off and same_result.for_nothing(self, op, worst_in, bool(records.known[at]), self.is_off(op)):
            if (worst := same_result.worst(self, op)) >= 0:
                left = self._origin(op, other, TAKEN, worst, 0.0)
                left.aside = True
        elif off:
            kind = PARAMETER if side.role[self.rows[worst_in][0]] == PARAMETERS else TAKEN
            made_here = self.target.producers.get(self.rows[worst_in][0]) in self.extra
            if argument >= 0 and not made_here:  # the step before was called with it too, and left what is taken in (running statistics)
                return self._origin(op, other, ARGUMENT, argument, 0.0, worst_in)
            return self._origin(op, other, kind, worst_in, 0.0)
        same_bits_in = self.one_program and not inside and float(records.outer[at]) > 0
        by_argument = comes_off or same_bits_in or (argument >= 0 and attribution.changes_places(self, op))
        if argument >= 0 and by_argument:
            return self._origin(op, other, ARGUMENT, argument, float(records.inner[at]), worst_out)
        if same_bits_in and op in self.lone_arguments:
            return self._origin(op, other, DEFAULT, int(records.worst_out[at]), 0.0)
        if comes_off and not np.isinf(inside):
            if left_out.hands_on(self, op) and records.inner[at] >= self.measured.distance[worst_out]:
                return left  # what went in comes out
            if ratio[worst_out] <= cancelling_gradients.steepness(self, op):
                return left
            kind = GRADIENT if side.role[self.rows[worst_out][0]] == PARAMETERS_GRAD else RESULT
            return self._origin(op, other, kind, worst_out, inside)
        return left

    def _worst(self, span: range, given: bool) -> int:
        """The pair of rows that is most off, of what comes out or of the tensors that go in; -1: nothing is."""
        role, rows, ratio, argument = self.side.role, self.rows, self.carried.ratio, self.measured.argument
        chosen = (
            k for k in span if (role[rows[k][0]] in (OUTPUT, PARAMETERS_GRAD)) is given and ratio[k] > 0 and (given or not argument[k])
        )
        return max(chosen, key=ratio.__getitem__, default=-1)

    def _origin(self, op: int, other: int, kind: str, at: int, inside: float, shown: int = -1) -> DifferenceOrigin:
        """`at`: the pair of rows to name; `shown`: that of the distance, when it is another one."""
        row, golden_row = self.rows[at]
        m, number = self.measured, at if shown < 0 else shown
        distance = float(m.distance[number])
        times = self.carried.ratio[number]
        count = distances.elements(self.side.shape[row])
        noise = count >= 64 and m.norm[at] * np.sqrt(count) <= 8 * m.extremes[at] and kind in (RESULT, GRADIENT)
        limit = distance / times if 0 < times < np.inf and distance < np.inf else 0.0
        return DifferenceOrigin(op, other, kind, row, golden_row, distance, inside, limit, times, bool(noise))

    def move(self, origin: DifferenceOrigin, at: int, given: int) -> None:
        """The difference begins in what another pair of records takes in; `given`: the pair of rows."""
        vars(origin).update(vars(self._origin(*self.structure.pairs[at], TAKEN, given, 0.0)))

    def blame_unmatched(self, origin: DifferenceOrigin) -> None:
        """What takes in the output of a call that only one side has: that call is the origin."""
        attribution.attribute_to_unmatched_call(self, origin)
        attribution.without_gradient(self, origin)

    def not_compared(self, op: int, given: bool = False) -> list[int]:
        """Rows of tensors that a record takes in (`given`: gives out) and that could not be compared."""
        side = self.side
        rows = (self.rows[at][0] for at in self.span_of(op) if not self.measured.compared[at])
        tensors = (row for row in rows if side.dtype[row] and distances.elements(side.shape[row]))
        return [row for row in tensors if (side.role[row] in (OUTPUT, PARAMETERS_GRAD)) is given]

    def is_off(self, op: int) -> bool:
        """Do outputs of a record differ by more than round-off?"""
        return any(self.side.role[self.rows[at][0]] in (OUTPUT, PARAMETERS_GRAD) and self.carried.alone[at] > 1 for at in self.span_of(op))


def _empty(name: str) -> bool:
    """Calls whose result is not defined (memory without values)."""
    return name.count(".") > 1 and name.split(".", 2)[1] in UNINITIALISED
