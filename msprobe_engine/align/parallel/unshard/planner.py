"""What becomes of each pair of rows of two layouts: a `MergePlan`.

What a row is a piece of follows from the placements that the dumps have recorded, else from the shapes of both sides: a dimension that is a
multiple on the other side is cut, equal shapes are replicas. Replicas that disagree are either parts of a sum that is still to come, which
cannot be compared, or a fault (`partial_sums`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import ADDING
from msprobe_engine.align.parallel import expected_differences, experts, merge_statistics, placements
from msprobe_engine.align.parallel.merge_statistics import AGREES, Cut, Floats
from msprobe_engine.align.parallel.micro_batches import Piece
from msprobe_engine.align.parallel.unshard.global_tensors import GlobalTensors, execute
from msprobe_engine.align.parallel.unshard.gradient_shares import GradientShares
from msprobe_engine.align.parallel.unshard.layout_pair import LayoutPair
from msprobe_engine.align.parallel.unshard.number_shares import NumberShares
from msprobe_engine.align.parallel.unshard.partial_sums import Call, PartialSums
from msprobe_engine.align.parallel.unshard.plan import LOCAL, PART, UNCLEAR, UPDATE, MergedRow, MergePlan
from msprobe_engine.align.parallel.unshard.rows_by_kind import RowsByKind
from msprobe_engine.core.operator_traits import MOVES
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD
from msprobe_engine.measure import distances


class Unsharder:
    """Puts the pieces of two runs together. The run of more pieces says what is a part and what a replica, whichever is the target.

    Args:
        target, golden: the pieces of both sides.
    """

    def __init__(self, target: Sequence[Piece], golden: Sequence[Piece]) -> None:
        self._turned = len(golden) > len(target)
        self._pair = LayoutPair(golden, target) if self._turned else LayoutPair(target, golden)

    def plan(self, factors: bool = True) -> MergePlan:
        """How each row is put together. `factors`: look for a common factor of the gradients and take it out."""
        return _Planner(self._pair, factors).make()

    def join(self, factors: bool = True) -> GlobalTensors:
        """Both wholes."""
        pair = self._pair
        whole = execute(self.plan(factors), pair.target, pair.golden, pair.structure, pair.producers)
        return whole.swap_sides(Tree(pair.golden_side).producers) if self._turned else whole


class _Members(NamedTuple):
    """A row of all pieces of both sides: float64 (pieces, 4), and where the target's are among its pieces."""

    target: Floats
    places: list[int]
    golden: Floats


class _Planner:
    def __init__(self, pair: LayoutPair, factors: bool) -> None:
        self._pair = pair
        self._plan = MergePlan(pair.partners)
        if factors:
            self._plan.factor, self._plan.sure = _common_factor(pair)
        self._sums = PartialSums(pair, self._plan)
        self._shares = NumberShares(pair)
        self._gradients = GradientShares(pair, self._plan.factor)
        self._by_kind = RowsByKind(pair, self._plan, self._sums)
        self._times: dict[int, int] = {}
        self._of_update: set[object] = set()

    def make(self) -> MergePlan:
        pair = self._pair
        for position, (op, _) in enumerate(pair.structure.pairs):
            self._record(op, pair.rows[pair.starts[position] : pair.starts[position + 1]])
        return self._plan

    def _record(self, op: int, rows: Sequence[tuple[int, int]]) -> None:
        pair, side, golden_side, skipped = self._pair, self._pair.side, self._pair.golden_side, self._plan.skipped
        inside = pair.first_backward < op <= pair.last_backward and not pair.is_forward(op)  # a function's own backward calls others
        if op > pair.last_backward and op not in pair.owned and pair.kinds[op] in pair.various:
            skipped.update((i, UPDATE) for i, _ in rows)
            return
        call = Call(op, inside or pair.kinds[op][0] in ("backward", "parameters_grad"))
        self._sums.note_written_before(op)
        for i, j in rows:
            if i in side.values and j in golden_side.values and self._is_expected_argument(i, j, rows):
                self._plan.arguments.add(i)
                call.local = True
        for i, j in sorted(rows, key=lambda row_pair: side.role[row_pair[0]] in (OUTPUT, PARAMETERS_GRAD)):
            if isinstance(side.shape[i], list) != isinstance(golden_side.shape[j], list):
                skipped[i] = UNCLEAR  # given on one side only, as a bias that is added after the reduction
                continue
            if i in side.values or j in golden_side.values or not isinstance(side.shape[i], list):
                continue
            call.cut |= self._row(call, i, j) and side.role[i] in (INPUT, PARAMETERS)
            if side.role[i] in (INPUT, PARAMETERS):
                call.tensors += 1
                call.lost += skipped.get(i) == LOCAL
                call.parts += skipped.get(i) in (LOCAL, PART)
            call.update |= skipped.get(i) == UPDATE

    def _is_expected_argument(self, i: int, j: int, rows: Sequence[tuple[int, int]]) -> bool:
        """Does an argument say where this rank is, or how large its piece is? Then it is no difference. `rows`: those of the call."""
        pair = self._pair
        target_values, golden_values = pair.target.values(i), pair.golden.values(j)
        target_value, golden_value = target_values[0], golden_values[0]
        most, op = max(len(pair.target.pieces), len(pair.golden.pieces)), pair.side.op[i]
        if all(value == target_value for value in target_values) and all(value == golden_value for value in golden_values):
            shares = self._plan.factor != 1.0 and op > pair.first_backward
            return target_value != golden_value and (
                expected_differences.sizes(target_value, golden_value, most)
                or (shares and expected_differences.inverse(target_value, golden_value, self._plan.factor))
                or (pair.is_forward(op) and expected_differences.whole_share(target_value, golden_value, most))
                or self._says_fill(target_value, golden_value, rows)
            )
        if pair.last_backward < op and all(isinstance(value, float) for value in (*target_values, *golden_values)):
            return True  # one number of what this rank holds, as its part of a norm
        return all(isinstance(value, (int, list)) for value in (*target_values, *golden_values))

    def _says_fill(self, target_size: Any, golden_size: Any, rows: Sequence[tuple[int, int]]) -> bool:
        """Two whole numbers that are the sizes of a dimension of the call's tensors that one side fills up."""
        if type(target_size) is not int or type(golden_size) is not int or target_size == golden_size:
            return False
        shapes = [(self._pair.side.shape[i], self._pair.golden_side.shape[j]) for i, j in rows]
        filled = [shape_pair for shape_pair in shapes if merge_statistics.is_padded(*shape_pair, len(self._pair.target.pieces))]
        return any((target_size, golden_size) in zip(*shape_pair) for shape_pair in filled)

    def _row(self, call: Call, i: int, j: int) -> bool:
        """Plan one pair of rows. Returns True when the row is a piece, or a part."""
        pair, skipped = self._pair, self._plan.skipped
        adds = call.backward and pair.several and pair.side.ops[call.op].split(".")[1] in ADDING
        accumulated = pair.side.role[i] == PARAMETERS_GRAD or (adds and pair.side.role[i] == OUTPUT)
        known = self._by_kind.decide(call, i, j)
        if known is None:
            known = self._share_of_gradient(call, i, j, adds)
        if known is not None:
            return known
        members = _Members(*pair.target.members(i, accumulated), pair.golden.members(j, accumulated)[0])
        known = self._told_by_what_went_in(call, i, j, members)
        if known is not None:
            return known
        made = self._put_together(call, i, j, members)
        if made is None or made.golden is None or i in skipped:
            return made is None or made.need > 1 or made.value is None
        if made.value is not None:
            self._times[i] = made.times
        value: Floats | None = made.value
        if value is None:
            whole = pair.side.shape[i] == pair.golden_side.shape[j] and made.need == made.other == 1 and call.backward and pair.cuts_batch
            if whole and self._gradients.is_share(i, j, made.shape, made.golden):
                skipped[i] = PART
                return True
            value = self._of_unlike(call, i, j, made, members)
            if value is None:
                return skipped.get(i) != LOCAL
        known = self._leave_out_after_all(call, i, j, made, value, members, accumulated)
        if known is None:
            self._merge(call, i, j, made, value, members)
            known = made.need > 1
        return known

    def _share_of_gradient(self, call: Call, i: int, j: int, adds: bool) -> bool | None:
        """What `_row` returns of a gradient of which a micro batch or a rank has its share; None: it is none. `adds`: the call adds up
        gradients."""
        pair = self._pair
        if adds and pair.side.role[i] == INPUT:
            self._plan.skipped[i] = PART  # the sum so far, and the share of one micro batch
            return True
        if pair.side.role[i] != PARAMETERS_GRAD:
            return None
        shape = list(pair.side.shape[i] or ())
        both = self._gradients.of_all_micro_batches(i, j)
        if both is not None:
            snapped = merge_statistics.snap(*both)
            self._plan.merged[i] = MergedRow(snapped, both[1], shape, len(pair.target.pieces), len(pair.golden.pieces))
            return False
        if self._gradients.is_unsummed(i, j):
            pieces, golden = pair.target.members(i, True)[0], pair.golden.members(j, True)[0][0]
            value = merge_statistics.farthest(pieces, 1, golden)
            self._plan.merged[i] = MergedRow(value, golden, shape, len(pieces), 1, always=True)
            return False
        both = self._gradients.means_of_shares(i, j)
        if both is not None:
            self._sums.leave_out(call, i, pair.target.members(i, True)[0])
            del self._plan.skipped[i]
            self._plan.by_mean.add(i)
            self._plan.merged[i] = MergedRow(*both, shape, 1, 1, always=True)
            return True
        return None

    def _told_by_what_went_in(self, call: Call, i: int, j: int, members: _Members) -> bool | None:
        """What `_row` returns of what is known from where the tensor comes from; None: its numbers have to tell."""
        pieces, _, golden_pieces = members
        pair, op, role = self._pair, call.op, self._pair.side.role[i]
        behind, single = pair.last_backward < op, pair.is_single(i, j)
        if behind and role == INPUT and self._sums.mark(i, pieces) in self._of_update:
            self._plan.skipped[i] = UPDATE
            return True
        if role == INPUT and self._sums.is_lost(i, pieces, golden_pieces):
            self._plan.skipped[i] = LOCAL
            return False
        partial = pair.target_placements.is_partial(i) or pair.golden_placements.is_partial(j)
        if not partial and single and behind and role == INPUT and pair.is_made_by_others(i, j):
            self._plan.skipped[i] = UPDATE
            return True
        if not partial and pair.is_forward(op):
            if single:
                partial = self._shares.is_unequal_mean(call, i, pieces, golden_pieces)
            else:
                partial = bool(len(golden_pieces)) and self._shares.are_in(call, i, pieces, golden_pieces)
        if partial:
            self._sums.leave_out(call, i, pieces)
            return True
        return None

    def _put_together(self, call: Call, i: int, j: int, members: _Members) -> Cut | None:
        """The wholes of both sides; rows that are parts by what the call has taken in are left out."""
        pieces, _, golden_pieces = members
        pair, side, golden_side = self._pair, self._pair.side, self._pair.golden_side
        shares = None
        if pair.is_single(i, j) and (pair.is_forward(call.op) or call.backward):
            shares = self._shares.of_number(call, i, j, pieces, golden_pieces)
        if shares is not None:
            means = merge_statistics.mean_of(pieces, shares[0]), merge_statistics.mean_of(golden_pieces, shares[1])
            made: Cut | None = Cut(side.shape[i], 1, 1, *means)
        else:
            times = self._times_known(i, j, pieces)
            made = merge_statistics.together(pieces, side.shape[i], golden_pieces, golden_side.shape[j], times)
        if made is None or made.golden is None:
            if self._sums.is_local(call, i):
                self._sums.lose(i, pieces, golden_pieces)
            elif made is not None and made.value is not None and self._needs_sum(call, i, j, golden_pieces, made):
                made = made._replace(golden=merge_statistics.farthest(golden_pieces, made.other, made.value))  # summed on one side only
                self._sums.note_unsummed(i, golden_pieces)
            else:
                self._sums.leave_out_golden(call, i, pieces, golden_pieces, made)
        if made is None or made.golden is None or i in self._plan.skipped:
            return made
        call.shared |= side.role[i] == INPUT and made.need != made.other
        apart = made.need == len(pieces) > 1 and made.other == len(golden_pieces) > 1  # the whole takes all pieces of both sides
        apart = apart or (merge_statistics.are_unlike(pieces) and merge_statistics.are_unlike(golden_pieces))
        of_parts = call.parts > 0 and (apart or (call.backward and side.ops[call.op].split(".")[1] in ADDING))
        linear = call.backward and pair.several and 0 < call.parts == call.tensors  # what is made of shares of micro batches alone
        forward = pair.kinds[call.op][0] == "forward"
        if side.role[i] == OUTPUT and (linear or (forward and (of_parts or (apart and call.elsewhere)))):
            self._sums.leave_out(call, i, pieces)
            return None
        return made

    def _leave_out_after_all(
        self, call: Call, i: int, j: int, made: Cut, value: Floats, members: _Members, accumulated: bool
    ) -> bool | None:
        """What `_row` returns of wholes that may differ between layouts; None: they are compared."""
        pieces, _, golden_pieces = members
        pair, side, op, golden, skipped = self._pair, self._pair.side, call.op, made.golden, self._plan.skipped
        assert golden is not None
        single, apart = pair.is_single(i, j), merge_statistics.distance(value, golden)
        long = expected_differences.long(side.shape[i])
        update = single or call.update or (long and op not in pair.owned)
        update &= not (pair.holds_all or (made.need == made.other == 1 and not long))
        of_some = min(pair.target.micro, pair.golden.micro) > 1 and len(pieces) == len(golden_pieces) == 1
        update |= single and (call.update or of_some)  # made of what is not compared, or in another order of micro batches
        # what a parameter's own update gives out is judged, but for copies of what went in and could not be compared
        gives = op in pair.owned and side.role[i] == OUTPUT and not single
        gives &= not (call.update and pair.kinds[op][-1] in MOVES)
        near = AGREES if not single else 0.0 if call.update else pair.near
        if pair.last_backward < op and update and not gives and apart > near:
            self._of_update.add(self._sums.mark(i, pieces))
            skipped[i] = UPDATE
            return True
        if self._sums.is_local(call, i) and (pair.is_mask(i) or apart > AGREES):
            self._sums.lose(i, pieces, golden_pieces)
            return False
        alone = side.role[i] == OUTPUT and pair.is_forward(op) and 0 < call.parts == call.tensors
        if alone and made.need == made.other == 1 and apart > AGREES:  # of the whole batch on one side, of a micro batch on the other
            self._sums.leave_out(call, i, pieces)
            return True
        same = side.shape[i] == pair.golden_side.shape[j]
        share = accumulated or (call.backward and pair.several and same)  # of what has no part of the batch
        if share and apart > AGREES and self._gradients.is_share(i, j, made.shape, golden):
            skipped[i] = PART
            return True
        if op > pair.shared_out and not gives and apart > AGREES:
            skipped[i] = UPDATE
            return True
        return None

    def _merge(self, call: Call, i: int, j: int, made: Cut, value: Floats, members: _Members) -> None:
        """The row is compared: of both sides as it is in the whole."""
        pair, side, plan, golden = self._pair, self._pair.side, self._plan, made.golden
        assert golden is not None
        pieces, places, golden_pieces = members
        loss = pair.is_forward(call.op) and distances.elements(side.shape[i]) == 1  # divided by the number of micro batches
        factor = plan.factor if call.backward or loss else 1.0
        if side.role[i] == PARAMETERS_GRAD and len(pieces) == made.need > 1 and len(golden_pieces) == made.other:
            factor = 1.0  # of parts of a parameter the gradients of all ranks have been put together, and averaged with it
        if factor != 1.0 and merge_statistics.distance(value / factor, golden) < merge_statistics.distance(value, golden):
            value = value / factor
        same = side.shape[i] == pair.golden_side.shape[j]
        if i not in plan.rank and same and merge_statistics.distance(value, golden) > AGREES:
            off = {
                pair.target.pieces[places[position]].rank
                for position in merge_statistics.without_partner(pieces / factor, golden_pieces, AGREES)
            }
            plan.rank.update((i, rank) for rank in off if len(off) == 1)
        if made.times > 1 and made.need == len(pieces) and side.role[i] == OUTPUT:
            self._sums.note_possible_parts(pieces, call.op)
        plan.merged[i] = MergedRow(merge_statistics.snap(value, golden), golden, made.shape, made.need, made.other)
        if made.need > 1:
            plan.made_of[i] = made.need

    def _needs_sum(self, call: Call, i: int, j: int, golden_pieces: Floats, made: Cut) -> bool:
        """The target has a sum where the golden side has parts, in a call that takes in no parts."""
        if self._pair.is_forward(call.op):
            return not self._sums.is_golden_part(call, i, j, golden_pieces)
        return self._pair.side.role[i] == INPUT and made.other == 1 and self._pair.is_update(call.op)

    def _of_unlike(self, call: Call, i: int, j: int, made: Cut, members: _Members) -> Floats | None:
        """Statistics of the whole where the replicas of the target do not agree; None when the row is left out for it."""
        pair, side, op, golden = self._pair, self._pair.side, call.op, made.golden
        assert golden is not None
        single = pair.is_single(i, j)
        pieces, places, golden_pieces = members
        if single and (number := merge_statistics.number_of(pieces, golden, pair.near)) is not None:
            return number
        if made.need == 1 and self._sums.is_reduced(call, i):
            self._sums.leave_out(call, i, pieces)
            return None
        value, place = merge_statistics.odd_one(pieces, made.need, golden, self._plan.factor if call.backward else 1.0, AGREES)
        if value is not None:
            self._plan.rank[i] = pair.target.pieces[places[place]].rank
            return value
        if op > pair.last_backward and (single or (call.update and self._sums.part_taken(op) < 0)):
            self._of_update.add(self._sums.mark(i, pieces))
            self._plan.skipped[i] = UPDATE
        elif single and pair.is_forward(op):
            return merge_statistics.mean_or_sum(pieces, golden)  # a loss over pieces of the batch
        elif self._sums.is_local(call, i):
            self._sums.lose(i, pieces, golden_pieces)
        elif op > pair.shared_out:
            self._plan.skipped[i] = UPDATE
        elif pair.is_update(op) and made.need == made.other == 1 and len(pieces) > 1 and side.role[i] == INPUT:
            self._sums.note_unsummed(i, pieces)
            far = max(merge_statistics.distance(piece, pieces[0]) for piece in pieces[1:])
            owner = pair.owned[op]
            if far > pair.agrees and side.shape[i] == pair.parameters.get(owner) and not experts.EXPERT.match(owner[0]):
                self._plan.apart.add(i)
            return merge_statistics.farthest(pieces, made.need, golden)
        elif not made.sure or self._sums.is_part(call, i, pieces) or self._sums.is_masked_gradient(i):
            self._sums.leave_out(call, i, pieces)
        elif call.backward and (filled := merge_statistics.zeros_elsewhere(pieces, golden, AGREES)) is not None:
            call.cut |= side.role[i] == INPUT  # what is made of it is a part
            return filled
        else:
            return merge_statistics.farthest(pieces, made.need, golden)
        return None

    def _times_known(self, i: int, j: int, pieces: Floats) -> int | None:
        """How often a row is cut more than the shapes say: as the dumps have recorded it, else as what it is a gradient of."""
        pair = self._pair
        if self._sums.is_noted(i, pieces):
            return 1
        least = merge_statistics.whole_shape(pair.side.shape[i], pair.golden_side.shape[j])
        recorded = None
        if least is not None and pair.side.role[i] in (INPUT, PARAMETERS):
            recorded = placements.times_cut(pair.target_placements, i, pair.golden_placements, j, least)
        return recorded or self._times_of_twin(i, j)

    def _times_of_twin(self, i: int, j: int) -> int | None:
        """Gradients are cut as what they are gradients of: how often the forward row of a backward one, and a parameter, was cut more
        than the shapes say."""
        pair, twin = self._pair, self._pair.twins.get(i)
        if twin is None or pair.side.shape[twin] != pair.side.shape[i]:
            return None
        partner = pair.partners.get(twin)
        return self._times.get(twin) if partner is not None and pair.golden_side.shape[partner] == pair.golden_side.shape[j] else None


def _common_factor(pair: LayoutPair) -> tuple[float, bool]:
    """Ratio of all gradients of the pieces to those of the whole (each piece takes the mean over its own part of the batch), and whether
    most gradients say so."""
    ratios = []
    side, golden_side = pair.side, pair.golden_side
    for i, j in pair.rows:
        if side.role[i] != INPUT or pair.kinds[side.op[i]][0] != "backward" or not side.shape[i] or not golden_side.shape[j]:
            continue
        target, golden = pair.target.members(i, False)[0], pair.golden.members(j, False)[0]
        made = merge_statistics.together(target, side.shape[i], golden, golden_side.shape[j])
        if made is None or made.value is None or made.golden is None or made.shape == side.shape[i] == golden_side.shape[j]:
            continue
        if made.value[3] > 0 and made.golden[3] > 0:
            ratios.append(made.value[3] / made.golden[3])
    if not ratios:
        return 1.0, False
    # a vote, not the middle: behind a defect in the backward pass all gradients have another ratio
    most = max(len(pair.target.pieces), len(pair.golden.pieces))
    all_ratios = np.asarray(ratios)
    votes = {f: int((np.abs(all_ratios / f - 1) < pair.agrees).sum()) for n in range(1, most + 1) for f in (float(n), 1.0 / n)}
    best = max(votes, key=lambda f: (votes[f], f == 1.0))
    return best if votes[best] >= max(1, len(ratios) // 5) else 1.0, 2 * votes[best] > len(ratios)
