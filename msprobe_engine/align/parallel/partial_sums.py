"""What becomes of parts of a sum, and of what says something of one rank only, on their way through the calls.

Replicas that disagree are either parts of a sum that is still to come, which cannot be compared, or a fault. They are parts when the call
has taken in something cut (a product over a cut dimension), or has only passed on such a part.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import ADDING, Matcher
from msprobe_engine.align.parallel import expected_differences, experts, merge_statistics, parameter_owner, pipeline_schedule, placements
from msprobe_engine.align.parallel.merge_statistics import Floats
from msprobe_engine.align.parallel.micro_batches import Piece, last_backward
from msprobe_engine.align.parallel.outcome import AGREES, IN_PLACE, LOCAL, NEAR, PART, PASSING, Call, GlobalTensors
from msprobe_engine.align.parallel.run_pieces import Run
from msprobe_engine.core import operator_traits as traits
from msprobe_engine.core.dtypes import is_bool, is_not_float
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import distances, roundoff

_Mark = tuple[tuple[str, int], bytes]


_UNITS = 4
"""Of the dtype of the runs: as near as that numbers of the same whole are, whatever their own dtype is."""

_MANY = 0.1
"""Part of the tensors that a run has in a dtype that all its numbers are rounded to."""


class _Means(NamedTuple):
    """Of a parameter's gradient.

    Attributes:
        target, golden: sum of the means of all pieces, of the last micro batch of each rank, and of all pieces in this record and those
            before it: one run shows the gradient of each micro batch, another one what they have added up to.
        size: root mean square of the elements; `elements`: how many.
    """

    target: list[float]
    golden: list[float]
    size: float
    elements: int


class PartialSumTracker:
    """Follows the target's tensors, record by record.

    Args:
        target, golden: the pieces of both sides.
    """

    def __init__(self, target: Sequence[Piece], golden: Sequence[Piece]) -> None:
        self._target, self._golden = Run(target), Run(golden)
        target_side, golden_side = self._target.first, self._golden.first
        self._experts = experts.experts_of(target_side)
        self._around = experts.around(self._target.tree) if self._experts else set()
        self._several = max(self._target.micro, self._golden.micro) > 1
        self._running: set[bytes] = set()
        self._owned = parameter_owner.owners(self._target.tree)
        trees = self._target.tree, self._golden.tree
        matched = parameter_owner.rematch_by_owner(Matcher(*trees).run(one_batch=False), *trees)
        self._structure = expected_differences.without_collectives(matched, *trees, self._owned)
        self._producers, self._golden_producers = Tree(target_side).producers, Tree(golden_side).producers
        self._golden_extra = set(self._structure.only_golden)
        self._records = dict(self._structure.pairs)
        self._rows, self._starts = distances.paired_rows(target_side, golden_side, self._structure.pairs)
        shares = expected_differences.shares_out(self._target.tree) or expected_differences.shares_out(self._golden.tree)
        self._shared_out = last_backward(self._target.tree) if shares else len(target_side.ops)
        self._various = self._target.various | self._golden.various | expected_differences.unequally_owned(*trees)
        coarse = max(_coarsest(target_side), _coarsest(golden_side))
        self._agrees, self._near = max(AGREES, _UNITS * coarse), max(NEAR, coarse if coarse > AGREES / _UNITS else 0.0)
        self._target_placements, self._golden_placements = map(placements.Placements, trees)
        self._partners = dict(self._rows)
        self._twins = placements.twins(self._target.tree)
        self._first_backward = self._target.tree.first_backward
        self._last_backward = last_backward(self._target.tree)
        passes = pipeline_schedule.segments(self._target.tree, pipeline_schedule.whole) if self._target.tree.has_modules else None
        self._passes = passes if passes and pipeline_schedule.count(passes) > 1 else None

    def _is_forward(self, op: int) -> bool:
        """A record of a forward pass, also of one that follows the backward pass of another micro batch."""
        if self._passes is None:
            return op < self._first_backward
        return self._passes[op] != pipeline_schedule.TAIL and self._passes[op][1] == pipeline_schedule.FORWARD

    def reset_tracking(self, whole: GlobalTensors) -> None:
        """Forget what was seen. `whole`: what the rows are put into."""
        self._whole = whole
        self._parts: dict[bytes, int] = {}
        self._times: dict[int, int] = {}
        self._shares: dict[tuple[tuple[str, int], bytes, bytes], tuple[int, int]] = {}
        self._partial: set[_Mark] = set()
        self._numbers: set[_Mark] = set()
        self._lost: set[_Mark] = set()
        self._masks: set[int] = set()
        self._written: dict[tuple[str, int], int | None] = {}
        self._extra = set(self._structure.only_target)
        self._next = 0

    def _written_before(self, op: int) -> None:
        """Calls up to this record that write into a part, or into what says something of one rank: it stays one, with other numbers."""
        side = self._target.first
        if not self._is_forward(op):
            self._written.clear()
        while self._next < op:
            call, self._next = self._next, self._next + 1
            if not IN_PLACE.fullmatch(side.ops[call].split(".")[1]) or self._target.tree.kinds[call][0] != "forward":
                continue
            taken = self._target.tree.tensors_in(call)
            if not taken:
                continue
            row = taken[0]
            pieces = self._target.members(row, False)[0]
            if pieces.tobytes() in self._parts or self._mark(row, pieces) in self._lost or self._takes_running(call):
                self._written[self._kind(row)] = self._parts.get(pieces.tobytes())

    def _is_running(self, call: Call, i: int) -> bool:
        """A single number that is added up over micro batches outside of the backward pass, as a loss for the log, or a buffer that it is
        written into."""
        side, kind = self._target.first, self._target.first.ops[call.op].split(".")[1]
        if not self._several or call.backward or i in side.values:
            return False
        if kind in ADDING:
            return distances.elements(side.shape[i]) == 1
        return kind in ("__getitem__", "__setitem__") and self._takes_running(call.op)

    def _note_running(self) -> None:
        """Find those numbers, and the buffers."""
        side = self._target.first
        for op in range(self._first_backward if self._several else 0):
            kind, rows = side.ops[op].split(".")[1], [row for row in side.rows(op) if isinstance(side.shape[row], list)]
            if kind in ADDING:
                added = [row for row in rows if side.role[row] == OUTPUT and distances.elements(side.shape[row]) == 1]
                self._running.update(self._target.members(row, False)[0].tobytes() for row in added)
                # a number that was taken from a buffer before
                for before in range(max(0, op - 4), op if added else 0):
                    if side.ops[before].split(".")[1] == "__getitem__" and isinstance(side.shape[side.rows(before).start], list):
                        self._running.add(self._target.members(side.rows(before).start, False)[0].tobytes())
            elif kind == "__setitem__" and self._takes_running(op):
                self._running.add(self._target.members(rows[0], False)[0].tobytes())

    def _takes_running(self, op: int) -> bool:
        rows = (row for row in self._target.first.rows(op) if row not in self._target.first.values) if self._running else ()
        return any(self._target.members(row, False)[0].tobytes() in self._running for row in rows)

    def _means(self, i: int, j: int) -> _Means | None:
        """Of a parameter's gradient that both sides have in one shape; None of experts, of which no other rank has any part, and of few
        elements."""
        shape = self._target.first.shape[i]
        count = distances.elements(shape)
        expert = experts.EXPERT.match(self._target.tree.kinds[self._target.first.op[i]][2])
        if shape != self._golden.first.shape[j] or count < roundoff.MANY or expert:
            return None
        sums = [(run.members(row, False)[0], run.members(row, True)[0]) for run, row in ((self._target, i), (self._golden, j))]
        golden = sums[1][1]
        target_means, golden_means = ([float(statistics[:, 2].sum()) for statistics in of_run] for of_run in sums)
        for means, run, row in ((target_means, self._target, i), (golden_means, self._golden, j)):
            before = [float(run.members(earlier, False)[0][:, 2].sum()) for earlier in run.before(row)]
            means.append(means[0] + sum(before))
        return _Means(target_means, golden_means, float(golden[:, 3].max()) / count**0.5, count) if len(golden) else None

    @cached_property
    def _gradients_are_local(self) -> bool:
        """Gradients of parameters are those of each micro batch by itself, and both sides make as many of them: what most of them say."""
        rows = [(i, j) for i, j in self._rows if self._target.first.role[i] == PARAMETERS_GRAD]
        pairs = [pair for i, j in rows if (pair := self._of_all_micro_batches(i, j)) is not None]
        return 2 * sum(merge_statistics.distance(*pair) <= self._agrees for pair in pairs) > len(pairs) > 0

    def _of_all_micro_batches(self, i: int, j: int) -> tuple[Floats, Floats] | None:
        """Statistics of the gradients of a parameter by all micro batches, side by side; None where the sides do not make as many."""
        pieces, golden_pieces = self._target.members(i, False)[0], self._golden.members(j, False)[0]
        alike = self._target.first.shape[i] == self._golden.first.shape[j] and isinstance(self._target.first.shape[i], list)
        if not self._several or not alike or len(pieces) != len(golden_pieces) or len(pieces) < 2:
            return None
        return merge_statistics.merge_pieces(pieces / self._whole.factor), merge_statistics.merge_pieces(golden_pieces)

    @cached_property
    def _way_of_shares(self) -> tuple[int, int, float] | None:
        """How gradients of parameters, of the pieces, make those of the whole: of either side the sum of all (0) or of the last micro
        batches (1), and what that of the target is divided by; what most parameters say. None: most say nothing."""
        votes: Counter[tuple[int, int, float]] = Counter()
        asked = 0
        for i, j in self._rows:
            if self._target.first.role[i] != PARAMETERS_GRAD or (means := self._means(i, j)) is None:
                continue
            asked += 1
            near = self._agrees * means.size * (means.elements**-0.5 + roundoff.BIAS)
            for target_choice, target_mean in enumerate(means.target):
                votes.update(
                    (target_choice, golden_choice, n)
                    for golden_choice, golden_mean in enumerate(means.golden)
                    for n in self._divisors()
                    if abs(target_mean / n - golden_mean) <= near
                )
        best = max(votes, key=votes.__getitem__, default=None)
        return best if best is not None and 2 * votes[best] > asked else None

    def _means_of_shares(self, i: int, j: int) -> tuple[Floats, Floats] | None:
        """Statistics of a parameter's gradient whose pieces are shares of a sum: their means add up, and nothing is known of the rest. None
        where they are no shares."""
        target_pieces, golden_pieces = self._target.members(i, True)[0], self._golden.members(j, True)[0]
        wholes = merge_statistics.merge_replicas(target_pieces, 1), merge_statistics.merge_replicas(golden_pieces, 1)
        if wholes[0] is not None and wholes[1] is not None and merge_statistics.distance(wholes[0], wholes[1]) <= self._agrees:
            return None
        if self._gradients_are_whole or self._way_of_shares is None or (means := self._means(i, j)) is None:
            return None
        target_choice, golden_choice, n = self._way_of_shares
        golden = merge_statistics.merge_pieces(golden_pieces)
        target = golden.copy()
        target[2], golden[2] = means.target[target_choice] / n, means.golden[golden_choice]
        return target, golden

    def _divisors(self) -> set[float]:
        """What a sum over pieces may be divided by."""
        most = max(len(self._target.pieces), len(self._golden.pieces))
        return {1.0, self._whole.factor, *(f for n in range(2, most + 1) for f in (float(n), 1 / n))}

    @cached_property
    def _gradients_are_whole(self) -> bool:
        """Gradients of parameters are those of the whole step, once its last micro batch has added its part: what most of them say."""
        rows = [(i, j) for i, j in self._rows if self._target.first.role[i] == PARAMETERS_GRAD]
        alike = 0
        for i, j in rows:
            target_whole, golden_whole = (
                merge_statistics.merge_replicas(run.members(row, True)[0], 1) for run, row in ((self._target, i), (self._golden, j))
            )
            if target_whole is not None and golden_whole is not None and self._target.first.shape[i] == self._golden.first.shape[j]:
                alike += merge_statistics.distance(target_whole / self._whole.factor, golden_whole) <= self._agrees
        return 2 * alike > len(rows)

    @cached_property
    def _cuts_batch(self) -> bool:
        """Each piece reads a part of the batch: a micro batch, or tokens of its own on each rank."""
        target, golden = self._target.first, self._golden.first
        return self._several or any(
            target.role[i] == INPUT
            and i not in self._producers
            and len(target.shape[i] or ()) > 1
            and target.shape[i] != golden.shape[j]
            and is_not_float(str(target.dtype[i]))
            and not is_bool(target.dtype[i])
            and merge_statistics.whole_shape(target.shape[i], golden.shape[j]) is not None
            for i, j in self._rows
        )

    def _is_share(self, i: int, j: int, shape: list[int], golden: Floats) -> bool:
        """A gradient of what has no part of the batch (a parameter, what is looked up by positions), of each piece by itself: their means
        add up to that of the whole, which is all there is to see."""
        if not self._cuts_batch or (self._target.first.role[i] == PARAMETERS_GRAD and (not self._several or self._gradients_are_whole)):
            return False
        means = []
        for run, row in ((self._target, i), (self._golden, j)):
            pieces, _ = run.members(row, False)
            last, _ = run.members(row, True)
            need = merge_statistics.count_pieces(run.first.shape[row], shape)
            if len(pieces) % need or len(last) % need:
                return False
            means.append([pieces[:, 2].sum() / need, last[:, 2].sum() / need])
        count = max(distances.elements(shape), 1)
        near = self._agrees * golden[3] / count**0.5 * min(1.0, count**-0.5 + roundoff.BIAS)
        factors = self._divisors()
        if experts.EXPERT.match(self._target.tree.kinds[self._target.first.op[i]][2]):
            factors = {self._whole.factor}  # of an expert no other rank has any part
        return any(abs(target_mean / n - golden_mean) <= near for target_mean in means[0] for golden_mean in means[1] for n in factors)

    def _is_local(self, call: Call, i: int) -> bool:
        """What a call gives out that was told where this rank is: masks and indices, or something made of the arguments alone."""
        side = self._target.first
        blind = call.lost == call.tensors  # nothing else goes in
        places = call.cut and side.ops[call.op].split(".")[1] in traits.SORTS and len(side.shape[i] or ()) == 1
        if places and side.role[i] == OUTPUT and not roundoff.eps(side.dtype[i]):
            return True
        return side.role[i] == OUTPUT and (call.local or call.lost > 0) and (not roundoff.eps(side.dtype[i]) or blind)

    def _masked_gradient(self, i: int) -> bool:
        """Of a part of which the forward pass has zeroed what belongs to other ranks: the backward pass does it too, in place."""
        twin = self._twins.get(i)
        part = twin is not None and self._whole.skipped.get(twin) == PART
        return part and self._target.first.role[i] == INPUT and self._producers.get(i) is None

    def _hands_on(self, call: Call) -> bool:
        """What comes out of a part that goes in alone is a part, whatever is done with it, and so is the sum of gradients so far."""
        name = self._target.first.ops[call.op].split(".")[1]
        alone = call.parts == call.tensors and self._target.tree.kinds[call.op][0] == "forward"
        return name in PASSING or alone or call.update or (call.backward and name in ADDING)

    def _kind(self, row: int) -> tuple[str, int]:
        """What a tensor keeps when it is written into."""
        return str(self._target.first.dtype[row]), distances.elements(self._target.first.shape[row])

    def _is_mask(self, i: int) -> bool:
        """Statistics of a mask are the same on all ranks, whatever it masks: which one it is, is known by the call that made it."""
        return str(self._target.first.dtype[i]).endswith("bool")

    def _lose(self, i: int, j: int, pieces: Floats, golden_pieces: Floats) -> None:
        if self._is_mask(i):
            self._masks.add(self._target.first.op[i])
        else:
            self._lost.update((self._mark(i, pieces), self._mark(i, golden_pieces)))
        self._skip(i, j, LOCAL)

    def _is_lost(self, i: int, pieces: Floats, golden_pieces: Floats) -> bool:
        """Does that come from what only says something of one rank, maybe written into since?"""
        if self._mark(i, pieces) in self._lost or self._mark(i, golden_pieces) in self._lost:
            return True
        if self._is_mask(i) and self._producers.get(i) in self._masks:
            return True
        if self._producers.get(i) is None and self._written.get(self._kind(i), -1) is None:
            self._lost.add(self._mark(i, pieces))
            del self._written[self._kind(i)]
            return True
        return False

    def _mark(self, i: int, pieces: Floats) -> _Mark:
        """Tells one tensor from others; `i` is its row in the target."""
        return self._kind(i), pieces.tobytes()

    def _without_golden(self, call: Call, i: int, j: int, pieces: Floats, golden_pieces: Floats, made: merge_statistics.Cut | None) -> None:
        """The golden side has parts of a sum here, or what cannot be put together; where the target has parts too, it is told by them."""
        if made is None or made.value is None:
            self._part(call, i, j, pieces)
        elif self._is_forward(call.op):
            self._part(call, i, j, golden_pieces)
        else:
            self._skip(i, j, PART)

    def _is_part(self, call: Call, i: int, pieces: Floats) -> bool:
        side, op = self._target.first, call.op
        if pieces.tobytes() in self._parts or side.role[i] == PARAMETERS_GRAD:
            return True
        if side.role[i] in (INPUT, PARAMETERS):
            if roundoff.eps(side.dtype[i]) == 0 and side.role[i] == INPUT and self._has_cut_table(op, i):
                return True  # tokens of other ranks are masked
            producer = self._producers.get(i)
            if producer is None and self._written.get(self._kind(i)) is not None:
                return True
            return producer in self._extra  # made by what only this layout does
        if self._part_taken(op) >= 0:
            return self._hands_on(call)
        return call.cut and not self._target.tree.children.get(op)

    def _is_golden_part(self, call: Call, i: int, j: int, golden_pieces: Floats) -> bool:
        """As `_is_part`, of the golden side, where the target has the sum: a row of a part that something only that side does has made, or
        that was written into, too."""
        if self._target.first.role[i] != OUTPUT:
            producer = self._golden_producers.get(j)
            return golden_pieces.tobytes() in self._parts or producer is None or producer in self._golden_extra
        return self._is_part(call, i, golden_pieces)

    def _has_cut_table(self, op: int, i: int) -> bool:
        """Something else that goes into a record is of another size on the other side."""
        target, golden = self._target.first, self._golden.first
        taken = (row for row in target.rows(op) if row != i and target.role[row] in (INPUT, PARAMETERS))
        rows = (row for row in taken if isinstance(target.shape[row], list))
        return any(row in self._partners and target.shape[row] != golden.shape[self._partners[row]] for row in rows)

    def _part_taken(self, op: int) -> int:
        """A row with a part that goes into a record; -1."""
        rows = self._target.first.rows(op)
        return next((row for row in rows if self._target.first.role[row] == INPUT and row in self._whole.source), -1)

    def _part(self, call: Call, i: int, j: int, pieces: Floats) -> None:
        op = call.op
        self._partial.add(self._mark(i, pieces))
        key = pieces.tobytes()
        if self._target.first.role[i] in (OUTPUT, PARAMETERS_GRAD):
            taken = self._part_taken(op)
            if taken >= 0 and self._hands_on(call):
                self._parts.setdefault(key, self._whole.source[taken])
            elif len(self._target.tree.kinds[self._parts.get(key, op)]) != 4 or key not in self._parts:  # the innermost module around it
                self._parts[key] = op
        elif key in self._parts:
            self._whole.source[i] = self._parts[key]
        elif self._producers.get(i) is None and (source := self._written.pop(self._kind(i), None)) is not None:
            self._whole.source[i] = self._parts[key] = source
        self._skip(i, j, PART)

    def _skip(self, i: int, j: int, why: str) -> None:
        self._whole.skipped[i] = why
        for side, row in ((self._whole.target, i), (self._whole.golden, j)):
            side.numbers[4 * row : 4 * row + 4] = array("d", (float("nan"),) * 4)
            side.nonfloat_stats[row] = (None, None, None, None)
            side.md5[row] = None
            side.shape[row] = None
            for known in (side.values, side.nans, side.infs, side.extra):
                known.pop(row, None)


def _coarsest(side: DumpTable) -> float:
    """Distance of 1.0 to the next number in the coarsest dtype that many tensors have; 0 without any."""
    units = Counter(unit for dtype, shape in zip(side.dtype, side.shape) if isinstance(shape, list) and (unit := roundoff.eps(dtype)))
    return max((unit for unit, n in units.items() if n >= _MANY * units.total()), default=0.0)
