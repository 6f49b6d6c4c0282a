"""Two runs of different layouts as two sides of the same shapes: each row of the whole from the rows of its pieces.

What a row is a piece of follows from the shapes of both sides: a dimension that is a multiple on the other side is cut, equal shapes are
replicas. Replicas that disagree are either parts of a sum that is still to come, which cannot be compared, or a fault. They are parts when
the call has taken in something cut (a product over a cut dimension), or has only passed on such a part.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import ADDING
from msprobe_engine.align.parallel import expected_differences, experts, merge_statistics, parameter_owner, placements
from msprobe_engine.align.parallel.merge_statistics import Floats
from msprobe_engine.align.parallel.outcome import (  # fmt: skip
    AGREES,
    EMPTY,
    LOCAL,
    NOTHING,
    PADDED,
    PART,
    RANDOM,
    ROUNDING,
    TOKENS,
    UNCLEAR,
    UPDATE,
    Call,
    GlobalTensors,
    copy,
)
from msprobe_engine.align.parallel.partial_sums import PartialSumTracker
from msprobe_engine.align.parallel.run_pieces import Run
from msprobe_engine.align.parallel.tied_embeddings import SHARE
from msprobe_engine.core import operator_traits as traits
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import distances, roundoff

_OF_BUFFERS = frozenset(("copy_", "narrow", "view", "view_as", "cat", *(f"{way}flatten_dense_tensors" for way in ("", "un", "_", "_un"))))


class Unsharder(PartialSumTracker):
    """Makes a `GlobalTensors` of the pieces of both sides."""

    def join(self, factors: bool = True) -> GlobalTensors:
        """Build both wholes. `factors`: look for a common factor of the gradients and take it out."""
        self.reset_tracking(GlobalTensors(copy(self._target.first), copy(self._golden.first), self._structure, self._producers))
        self._whole.factor = self._factor() if factors else 1.0
        self._note_running()
        for position, (op, _) in enumerate(self._structure.pairs):
            self._record(op, self._rows[self._starts[position] : self._starts[position + 1]])
        return self._whole

    def join_turned(self, factors: bool = True) -> GlobalTensors:
        """As `join`, with the second run as the target."""
        return self.join(factors).swap_sides(self._partners, Tree(self._golden.first).producers)

    def _record(self, op: int, rows: Sequence[tuple[int, int]]) -> None:
        side = self._target.first
        inside = self._first_backward < op <= self._last_backward and not self._is_forward(op)  # a function's own backward calls others
        if op > self._last_backward and op not in self._owned and self._target.tree.kinds[op] in self._various:
            for i, j in rows:
                self._skip(i, j, UPDATE)
            return
        call = Call(op, inside or self._target.tree.kinds[op][0] in ("backward", "parameters_grad"))
        self._written_before(op)
        for i, j in rows:
            if i in side.values and j in self._golden.first.values:
                call.local |= self._argument(i, j, rows)
        for i, j in sorted(rows, key=lambda pair: side.role[pair[0]] in (OUTPUT, PARAMETERS_GRAD)):
            if isinstance(side.shape[i], list) != isinstance(self._golden.first.shape[j], list):
                self._skip(i, j, UNCLEAR)  # given on one side only, as a bias that is added after the reduction
                continue
            if i in side.values or j in self._golden.first.values or not isinstance(side.shape[i], list):
                continue
            call.cut |= self._row(call, i, j) and side.role[i] in (INPUT, PARAMETERS)
            if side.role[i] in (INPUT, PARAMETERS):
                call.tensors += 1
                call.lost += self._whole.skipped.get(i) == LOCAL
                call.parts += self._whole.skipped.get(i) in (LOCAL, PART)
            call.update |= self._whole.skipped.get(i) == UPDATE

    def _argument(self, i: int, j: int, rows: Sequence[tuple[int, int]]) -> bool:
        """Does an argument say where this rank is, or how large its piece is? Then it is no difference. `rows`: those of the call."""
        target_values, golden_values = self._target.values(i), self._golden.values(j)
        most = max(len(self._target.pieces), len(self._golden.pieces))
        after = self._last_backward < self._target.first.op[i]
        if all(value == target_values[0] for value in target_values) and all(value == golden_values[0] for value in golden_values):
            shares = self._whole.factor != 1.0 and self._target.first.op[i] > self._first_backward
            if target_values[0] == golden_values[0] or not (
                expected_differences.sizes(target_values[0], golden_values[0], most)
                or (shares and expected_differences.inverse(target_values[0], golden_values[0], self._whole.factor))
                or (
                    self._is_forward(self._target.first.op[i])
                    and expected_differences.whole_share(target_values[0], golden_values[0], most)
                )
                or self._says_fill(target_values[0], golden_values[0], rows)
            ):
                return False
        elif after and all(isinstance(value, float) for value in (*target_values, *golden_values)):
            pass  # one number of what this rank holds, as its part of a norm
        elif not all(isinstance(value, (int, list)) for value in (*target_values, *golden_values)):
            return False
        whole, golden = self._whole.target, self._whole.golden
        whole.values[i], whole.shape[i], whole.md5[i] = golden.values[j], golden.shape[j], golden.md5[j]
        whole.numbers[4 * i : 4 * i + 4] = golden.numbers[4 * j : 4 * j + 4]
        whole.nonfloat_stats.pop(i, None)
        if j in golden.nonfloat_stats:
            whole.nonfloat_stats[i] = golden.nonfloat_stats[j]
        return True

    def _says_fill(self, target_size: Any, golden_size: Any, rows: Sequence[tuple[int, int]]) -> bool:
        """Two whole numbers that are the sizes of a dimension of the call's tensors that one side fills up."""
        if type(target_size) is not int or type(golden_size) is not int or target_size == golden_size:
            return False
        shapes = [(self._target.first.shape[i], self._golden.first.shape[j]) for i, j in rows]
        filled = [pair for pair in shapes if merge_statistics.is_padded(*pair, len(self._target.pieces))]
        return any((target_size, golden_size) in zip(*pair) for pair in filled)

    def _row(self, call: Call, i: int, j: int) -> bool:
        """Merge one pair of rows. Returns True when the row is a piece, or a part."""
        known = self._told_by_itself(call, i, j)
        if known is not None:
            return known
        target_side, golden_side, op = self._target.first, self._golden.first, call.op
        adds = call.backward and self._several and target_side.ops[op].split(".")[1] in ADDING
        if adds and target_side.role[i] == INPUT:
            self._skip(i, j, PART)  # the sum so far, and the share of one micro batch
            return True
        if (
            target_side.role[i] == PARAMETERS_GRAD
            and self._gradients_are_local
            and (both_statistics := self._of_all_micro_batches(i, j)) is not None
        ):
            target_numbers, golden_numbers = both_statistics
            for side, row, numbers, run in (
                (self._whole.target, i, _snap_to_golden(target_numbers, golden_numbers), self._target),
                (self._whole.golden, j, golden_numbers, self._golden),
            ):
                self._store_row(side, row, numbers, list(target_side.shape[i] or ()), len(run.pieces), run)
            return False
        if target_side.role[i] == PARAMETERS_GRAD and (both_statistics := self._means_of_shares(i, j)) is not None:
            self._part(call, i, j, self._target.members(i, True)[0])
            del self._whole.skipped[i]
            self._whole.by_mean.add(i)
            shape = list(target_side.shape[i] or ())
            self._store_row(self._whole.target, i, both_statistics[0], shape, 1, self._target, anyway=True)
            self._store_row(self._whole.golden, j, both_statistics[1], shape, 1, self._golden, anyway=True)
            return True
        accumulated = target_side.role[i] == PARAMETERS_GRAD or (adds and target_side.role[i] == OUTPUT)
        golden_pieces, _ = self._golden.members(j, accumulated)
        pieces, places = self._target.members(i, accumulated)
        if self._last_backward < op and target_side.role[i] == INPUT and self._mark(i, pieces) in self._numbers:
            self._skip(i, j, UPDATE)
            return True
        if target_side.role[i] == INPUT and self._is_lost(i, pieces, golden_pieces):
            self._skip(i, j, LOCAL)
            return False
        if self._target_placements.is_partial(i) or self._golden_placements.is_partial(j):
            self._part(call, i, j, pieces)
            return True
        single = distances.elements(target_side.shape[i]) == distances.elements(golden_side.shape[j]) == 1
        if single and self._last_backward < op and target_side.role[i] == INPUT and self._made_by_others(i, j):
            self._skip(i, j, UPDATE)
            return True
        if not single and len(golden_pieces) and self._is_forward(op) and self._holds_shares(call, i, pieces, golden_pieces):
            self._part(call, i, j, pieces)
            return True
        made: merge_statistics.Cut | None
        if single and self._is_forward(op) and self._is_unequal_mean(call, i, pieces, golden_pieces):
            self._part(call, i, j, pieces)
            return True
        shares = self._shares_of_number(call, i, j, pieces, golden_pieces) if single and (self._is_forward(op) or call.backward) else None
        if shares is not None:
            means = merge_statistics.mean_of(pieces, shares[0]), merge_statistics.mean_of(golden_pieces, shares[1])
            made = merge_statistics.Cut(target_side.shape[i], 1, 1, *means)
        else:
            made = merge_statistics.together(
                pieces, target_side.shape[i], golden_pieces, golden_side.shape[j], self._times_known(i, j, pieces)
            )
        if made is None or made.golden is None:
            if self._is_local(call, i):
                self._lose(i, j, pieces, golden_pieces)
            elif made is not None and made.value is not None and self._needs_sum(call, i, j, golden_pieces, made):
                made = made._replace(golden=merge_statistics.farthest(golden_pieces, made.other, made.value))  # summed on one side only
                self._note_unsummed(i, golden_pieces)
            else:
                self._without_golden(call, i, j, pieces, golden_pieces, made)
        if made is None or made.golden is None or i in self._whole.skipped:
            return made is None or made.need > 1 or made.value is None
        shape, need, golden, value = made.shape, made.need, made.golden, made.value
        call.shared |= target_side.role[i] == INPUT and need != made.other
        apart = need == len(pieces) > 1 and made.other == len(golden_pieces) > 1  # no two pieces of either side say the same
        of_parts = call.parts > 0 and (apart or (call.backward and target_side.ops[op].split(".")[1] in ADDING))
        linear = call.backward and self._several and 0 < call.parts == call.tensors  # what is made of shares of micro batches alone
        forward = self._target.tree.kinds[op][0] == "forward"
        if target_side.role[i] == OUTPUT and (linear or (forward and (of_parts or (apart and call.elsewhere)))):
            self._part(call, i, j, pieces)
            return True
        if value is not None:
            self._times[i] = made.times
        same = target_side.shape[i] == golden_side.shape[j]
        whole = same and need == made.other == 1 and call.backward and self._cuts_batch
        if value is None and whole and self._is_share(i, j, shape, golden):
            self._skip(i, j, PART)
            return True
        if value is None:
            value = self._of_unlike(call, i, j, made, accumulated)
            if value is None:
                return self._whole.skipped.get(i) != LOCAL
        update = single or call.update or (expected_differences.long(target_side.shape[i]) and op not in self._owned)
        update &= not (self._holds_all or (made.need == made.other == 1 and not expected_differences.long(target_side.shape[i])))
        update |= single and call.update  # made of what is not compared
        gives = op in self._owned and target_side.role[i] == OUTPUT and not single  # what a parameter's own update gives out is judged
        update &= not gives
        near = AGREES if not single else 0.0 if call.update else self._near
        if self._last_backward < op and update and merge_statistics.distance(value, golden) > near:
            self._numbers.add(self._mark(i, pieces))
            self._skip(i, j, UPDATE)
            return True
        if self._is_local(call, i) and (self._is_mask(i) or merge_statistics.distance(value, golden) > AGREES):
            self._lose(i, j, pieces, golden_pieces)
            return False
        share = accumulated or (call.backward and self._several and same)  # of what has no part of the batch
        if share and merge_statistics.distance(value, golden) > AGREES and self._is_share(i, j, shape, golden):
            self._skip(i, j, PART)
            return True
        if op > self._shared_out and not gives and merge_statistics.distance(value, golden) > AGREES:
            self._skip(i, j, UPDATE)
            return True
        loss = self._is_forward(op) and distances.elements(target_side.shape[i]) == 1  # divided by the number of micro batches
        factor = self._whole.factor if call.backward or loss else 1.0
        if factor != 1.0 and merge_statistics.distance(value / factor, golden) < merge_statistics.distance(value, golden):
            value = value / factor
        if i not in self._whole.rank and target_side.shape[i] == golden_side.shape[j] and merge_statistics.distance(value, golden) > AGREES:
            off = {
                self._target.pieces[places[position]].rank
                for position in merge_statistics.without_partner(pieces / factor, golden_pieces, AGREES)
            }
            self._whole.rank.update((i, rank) for rank in off if len(off) == 1)
        if made.times > 1 and need == len(pieces) and target_side.role[i] == OUTPUT:
            self._parts.setdefault(pieces.tobytes(), op)  # pieces or parts: what takes it in will tell
        value = _snap_to_golden(value, golden)
        self._store_row(self._whole.target, i, value, shape, need, self._target)
        self._store_row(self._whole.golden, j, golden, shape, made.other, self._golden)
        if need > 1:
            self._whole.made_of[i] = need
        return need > 1

    @cached_property
    def _holds_all(self) -> bool:
        """Every rank updates all of each parameter: what an update computes, to the last number, is the same in both layouts."""
        target_side, golden_side = self._target.first, self._golden.first
        behind = [(i, j) for i, j in self._rows if target_side.op[i] > self._last_backward and roundoff.eps(target_side.dtype[i])]
        tables = [
            (target_side.shape[i], golden_side.shape[j])
            for i, j in behind
            if isinstance(target_side.shape[i], list) and len(target_side.shape[i]) > 1
        ]
        return (
            bool(tables)
            and self._shared_out == len(target_side.ops)
            and all(target_shape == golden_shape for target_shape, golden_shape in tables)
        )

    @cached_property
    def _buffers(self) -> set[int]:
        """Calls of no module that put gradients into flat buffers and take them out: what lies in a buffer, and after which micro batch,
        each layout decides by itself."""
        side, buffers = self._target.first, set[int]()
        for op, (direction, *_, api) in enumerate(self._target.tree.kinds):
            if direction == "forward" and len(self._target.tree.kinds[op]) == 3 and api in _OF_BUFFERS:
                rows = (row for row in side.rows(op) if roundoff.eps(side.dtype[row]))
                if any(isinstance(side.shape[row], list) and len(side.shape[row] or ()) == 1 for row in rows):
                    buffers.add(op)
        return buffers

    def _shares_of_number(self, call: Call, i: int, j: int, pieces: Floats, golden_pieces: Floats) -> tuple[int, int] | None:
        """A number of each piece (tokens counted, a loss over a part of the batch): how many of them make that of the whole, on each side.
        None: all pieces of a side say the same, and nothing that was cut goes in."""
        number = self._number(i, pieces, golden_pieces)
        alike = all(merge_statistics.merge_replicas(side, 1) is not None for side in (pieces, golden_pieces))
        if self._target.first.role[i] != OUTPUT and not call.backward:
            if number not in self._shares and not alike and not self._is_made_by_both(i, j):
                self._shares[number] = merge_statistics.shares(pieces, golden_pieces, self._agrees)
            shares = self._shares.get(number, None if alike else (1, 1))
            call.shared |= shares is not None
            call.scaled |= shares not in (None, (1, 1))
            return shares
        if alike and not (call.cut or call.shared or call.parts or call.backward):
            return None
        shares = merge_statistics.shares(pieces, golden_pieces, self._agrees)
        self._shares[number] = shares
        return None if alike and shares == (1, 1) else shares

    @cached_property
    def _parameters(self) -> dict[parameter_owner.Owner, Any]:
        """The shapes of parameters that modules show."""
        side, kinds = self._target.first, self._target.tree.kinds
        rows = (row for row in range(len(side)) if side.role[row] == PARAMETERS)
        return {parameter_owner.owner_of(side, row, kinds[side.op[row]]): side.shape[row] for row in rows}

    def _is_made_by_both(self, i: int, j: int) -> bool:
        """What a row holds was given out by one record that both sides have."""
        target_source, golden_source = self._producers.get(i), self._golden_producers.get(j)
        return target_source is not None and golden_source is not None and self._records.get(target_source) == golden_source

    def _made_by_others(self, i: int, j: int) -> bool:
        """What a row holds was given out by calls of two kinds: runs that clip gradients by other code pair numbers that are not of one
        meaning."""
        target_source, golden_source = self._producers.get(i), self._golden_producers.get(j)
        return (
            target_source is not None
            and golden_source is not None
            and self._target.tree.kinds[target_source] != self._golden.tree.kinds[golden_source]
        )

    def _needs_sum(self, call: Call, i: int, j: int, golden_pieces: Floats, made: merge_statistics.Cut) -> bool:
        """The target has a sum where the golden side has parts, in a call that takes in no parts."""
        if self._is_forward(call.op):
            return not self._is_golden_part(call, i, j, golden_pieces)
        return self._target.first.role[i] == INPUT and made.other == 1 and self._updates(call.op)

    def _note_unsummed(self, i: int, parts: Floats) -> None:
        if (source := self._parts.get(parts.tobytes())) is not None:
            self._whole.source[i] = source
            self._whole.unsummed.add(i)

    def _updates(self, op: int) -> bool:
        """A call of the update of one parameter, where each rank has all of it."""
        return self._last_backward < op <= self._shared_out and op in self._owned

    def _holds_shares(self, call: Call, i: int, pieces: Floats, golden_pieces: Floats) -> bool:
        """A tensor with numbers in it of which each piece has its share, as a loss and the tokens it is a sum over, side by side."""
        number = self._number(i, pieces, golden_pieces)
        if self._target.first.role[i] != OUTPUT:
            return number in self._shares
        if not call.scaled or (shares := merge_statistics.shares(pieces, golden_pieces, self._agrees)) == (1, 1):
            return False
        self._shares[number] = shares
        return True

    def _is_unequal_mean(self, call: Call, i: int, pieces: Floats, golden_pieces: Floats) -> bool:
        """A number made of shares, or a mean over the labels that count, that is neither the sum nor the mean of the pieces' numbers, and
        may be a mean with unlike weights."""
        counted = call.cut and self._target.first.ops[call.op].split(".")[1] in traits.LOSSES_OF_LABELS
        if self._target.first.role[i] != OUTPUT or not (counted or call.scaled or call.parts) or min(len(pieces), len(golden_pieces)) < 1:
            return False
        near = merge_statistics.SAME if counted else self._near
        means = merge_statistics.distance(merge_statistics.mean_of(pieces), merge_statistics.mean_of(golden_pieces))
        fits = means <= near or merge_statistics.shares(pieces, golden_pieces, near) != (1, 1)
        return not fits and merge_statistics.may_be_means(pieces, golden_pieces)

    def _number(self, i: int, pieces: Floats, golden_pieces: Floats) -> tuple[tuple[str, int], bytes, bytes]:
        return self._kind(i), pieces.tobytes(), golden_pieces.tobytes()

    def _of_unlike(self, call: Call, i: int, j: int, made: merge_statistics.Cut, accumulated: bool) -> Floats | None:
        """Statistics of the whole where the replicas of the target do not agree; None when the row is left out for it."""
        target_side, op, golden = self._target.first, call.op, made.golden
        assert golden is not None
        single = distances.elements(target_side.shape[i]) == distances.elements(self._golden.first.shape[j]) == 1
        pieces, places = self._target.members(i, accumulated)
        if single and (number := merge_statistics.number_of(pieces, golden, self._near)) is not None:
            return number
        value, place = merge_statistics.odd_one(pieces, made.need, golden, self._whole.factor if call.backward else 1.0, AGREES)
        if value is not None:
            self._whole.rank[i] = self._target.pieces[places[place]].rank
            return value
        if op > self._last_backward and (single or (call.update and self._part_taken(op) < 0)):
            self._numbers.add(self._mark(i, pieces))
            self._skip(i, j, UPDATE)
        elif single and self._is_forward(op):
            return merge_statistics.mean_or_sum(pieces, golden)  # a loss over pieces of the batch
        elif self._is_local(call, i):
            self._lose(i, j, pieces, self._golden.members(j, accumulated)[0])
        elif op > self._shared_out:
            self._skip(i, j, UPDATE)
        elif self._updates(op) and made.need == made.other == 1 and len(pieces) > 1 and target_side.role[i] == INPUT:
            self._note_unsummed(i, pieces)
            far = max(merge_statistics.distance(piece, pieces[0]) for piece in pieces[1:])
            owner = self._owned[op]
            if far > self._agrees and target_side.shape[i] == self._parameters.get(owner) and not experts.EXPERT.match(owner[0]):
                self._whole.apart.add(i)
            return merge_statistics.farthest(pieces, made.need, golden)
        elif not made.sure or self._is_part(call, i, pieces) or self._masked_gradient(i):
            self._part(call, i, j, pieces)
        elif call.backward and (filled := merge_statistics.zeros_elsewhere(pieces, golden, AGREES)) is not None:
            call.cut |= target_side.role[i] == INPUT  # what is made of it is a part
            return filled
        else:
            return merge_statistics.farthest(pieces, made.need, golden)
        return None

    def _told_by_itself(self, call: Call, i: int, j: int) -> bool | None:
        """What `_row` returns, of rows whose kind or shape says it, without a look at the numbers; None: the numbers have to tell."""
        target_side, golden_side, op = self._target.first, self._golden.first, call.op
        if expected_differences.random_state(target_side.dtype[i], target_side.shape[i]):
            self._skip(i, j, RANDOM)
            return False
        if NOTHING in (target_side.nonfloat_stats.get(i), golden_side.nonfloat_stats.get(j)):
            self._skip(i, j, EMPTY)
            return False
        if SHARE in target_side.extra.get(i, ()) or SHARE in golden_side.extra.get(j, ()):
            self._skip(i, j, PART)
            return True
        if call.backward and op in self._buffers:
            self._skip(i, j, PART)
            return False
        unlike = merge_statistics.whole_shape(target_side.shape[i], golden_side.shape[j]) is None
        if self._experts or unlike:  # where only functions are recorded no name tells of experts
            if experts.LISTED in target_side.extra.get(i, ()) or experts.LISTED in golden_side.extra.get(j, ()):
                self._skip(i, j, TOKENS)
                return False
            tokens = experts.tokens(self._target.everywhere(i), self._golden.everywhere(j))
            if tokens is not None:
                return self._tokens(call, i, j, tokens)
            if op in self._around and self._other_groups(i, j):
                self._skip(i, j, TOKENS)
                return False
        if call.backward and target_side.role[i] == OUTPUT and self._takes_other_tokens(op):
            self._skip(i, j, TOKENS)
            return False
        if unlike:
            flat = len(target_side.shape[i]) == len(golden_side.shape[j]) == 1
            own = self._producers.get(i) is None and (call.buffer or not call.tensors)
            if flat and (own or (call.backward and self._target.tree.kinds[op][0] == "forward")):
                call.buffer = True
                self._skip(i, j, UNCLEAR)  # a flat buffer of what lies on this rank
                return False
            pads = merge_statistics.is_padded(target_side.shape[i], golden_side.shape[j], len(self._target.pieces))
            call.elsewhere |= pads
            if pads and self._is_forward(op) and self._filled_up(i, j):
                return True
            update = call.update or (self._last_backward < op and expected_differences.long(target_side.shape[i]))
            moved = (
                call.backward and target_side.ops[op].split(".")[1] in traits.MOVES
            )  # buffers of gradients, which each layout has of its own
            if pads or call.cut or update or moved or (op > self._last_backward and op not in self._owned):
                self._skip(i, j, PADDED if pads else UPDATE if update else UNCLEAR)
            return pads
        if self._is_running(call, i):
            self._skip(i, j, PART)
            return True
        return None

    def _tokens(self, call: Call, i: int, j: int, tokens: experts.Tokens) -> bool:
        """Merge rows with a row per token. Returns True: they are pieces."""
        numbers = not roundoff.eps(self._target.first.dtype[i])  # places of tokens, which are other ones on each rank
        if tokens.target is None or tokens.golden is None or (numbers and not merge_statistics.close(tokens.target, tokens.golden)):
            self._skip(i, j, TOKENS)
            return True
        value, golden, factor = tokens.target, tokens.golden, self._whole.factor
        if call.backward and merge_statistics.distance(value / factor, golden) < merge_statistics.distance(value, golden):
            value = value / factor
        value = _snap_to_golden(value, golden)
        self._store_row(self._whole.target, i, value, tokens.shape, 2, self._target)
        self._store_row(self._whole.golden, j, golden, tokens.shape, 2, self._golden)
        self._whole.made_of[i] = tokens.pieces
        return True

    def _takes_other_tokens(self, op: int) -> bool:
        """All that goes into a record is of tokens that the other side has in other groups."""
        side = self._target.first
        taken = [
            row for row in side.rows(op) if side.role[row] == INPUT and isinstance(self._whole.target.shape[row] or side.shape[row], list)
        ]
        return bool(taken) and all(self._whole.skipped.get(row) == TOKENS for row in taken)

    def _other_groups(self, i: int, j: int) -> bool:
        """Counts and places of tokens, in the calls that exchange them, that are not the same: each layout has groups of its own."""
        target_side, golden_side = self._target.first, self._golden.first
        if merge_statistics.whole_shape(target_side.shape[i], golden_side.shape[j]) is None:
            return True
        if roundoff.eps(target_side.dtype[i]):
            return False
        target_stats, golden_stats = (
            np.array([stats for _, stats in run.everywhere(row)]) for run, row in ((self._target, i), (self._golden, j))
        )
        return len(target_stats) != len(golden_stats) or not merge_statistics.close(
            merge_statistics.merge_pieces(target_stats), merge_statistics.merge_pieces(golden_stats)
        )

    def _filled_up(self, i: int, j: int) -> bool:
        """A table with more rows than the other side's holds at least what that one holds; True when it could be said."""
        target_side, golden_side = self._target.first, self._golden.first
        whole = merge_statistics.filled_up(
            self._target.members(i, False)[0], target_side.shape[i], self._golden.members(j, False)[0], golden_side.shape[j]
        )
        if whole is None or whole.value is None or whole.golden is None:
            return False
        self._store_row(self._whole.target, i, whole.value, whole.shape, whole.need, self._target, True)
        self._store_row(self._whole.golden, j, whole.golden, whole.shape, whole.other, self._golden, True)
        self._whole.made_of[i] = whole.need
        return True

    def _times_known(self, i: int, j: int, pieces: Floats) -> int | None:
        """How often a row is cut more than the shapes say: as the dumps have recorded it, else as what it is a gradient of."""
        if self._mark(i, pieces) in self._partial:
            return 1
        least = merge_statistics.whole_shape(self._target.first.shape[i], self._golden.first.shape[j])
        recorded = None
        if least is not None and self._target.first.role[i] in (INPUT, PARAMETERS):
            recorded = placements.times_cut(self._target_placements, i, self._golden_placements, j, least)
        return recorded or self._times_of_twin(i, j)

    def _times_of_twin(self, i: int, j: int) -> int | None:
        """Gradients are cut as what they are gradients of: how often the forward row of a backward one, and a parameter, was cut more
        than the shapes say."""
        twin = self._twins.get(i)
        if twin is None or self._target.first.shape[twin] != self._target.first.shape[i]:
            return None
        partner = self._partners.get(twin)
        return self._times.get(twin) if partner is not None and self._golden.first.shape[partner] == self._golden.first.shape[j] else None

    @staticmethod
    def _store_row(side: DumpTable, row: int, value: Floats, shape: list[int], need: int, run: Run, anyway: bool = False) -> None:
        if need == 1 and len(run.pieces) == 1 and not anyway:
            return
        span = slice(4 * row, 4 * row + 4)
        if side.shape[row] != shape or not np.array_equal(side.numbers[span], value, equal_nan=True):
            side.md5[row], side.data_name[row] = None, ""  # checksums and saved tensors are of what one rank holds
            side.extra[row] = {key: fact for key, fact in side.extra.get(row, {}).items() if key != "digest"}
        side.numbers[span] = array("d", value.tolist())
        if side.shape[row] != shape:
            side.shape[row] = shape
            side.nonfloat_stats.pop(row, None)
        for known, which in ((side.nans, attrgetter("nans")), (side.infs, attrgetter("infs"))):
            count = run.count(row, which) * need // len(run.pieces)  # replicas hold the same ones
            if count:
                known[row] = count

    def _factor(self) -> float:
        """Ratio of all gradients of the pieces to those of the whole: each piece takes the mean over its own part of the batch."""
        ratios = []
        target_side, golden_side = self._target.first, self._golden.first
        for i, j in self._rows:
            if (
                target_side.role[i] != INPUT
                or self._target.tree.kinds[target_side.op[i]][0] != "backward"
                or not target_side.shape[i]
                or not golden_side.shape[j]
            ):
                continue
            made = merge_statistics.together(
                self._target.members(i, False)[0], target_side.shape[i], self._golden.members(j, False)[0], golden_side.shape[j]
            )
            if made is None or made.value is None or made.golden is None or made.shape == target_side.shape[i] == golden_side.shape[j]:
                continue
            if made.value[3] > 0 and made.golden[3] > 0:
                ratios.append(made.value[3] / made.golden[3])
        if not ratios:
            return 1.0
        # a vote, not the middle: behind a defect in the backward pass all gradients have another ratio
        most = max(len(self._target.pieces), len(self._golden.pieces))
        all_ratios = np.asarray(ratios)
        votes = {f: int((np.abs(all_ratios / f - 1) < self._agrees).sum()) for n in range(1, most + 1) for f in (float(n), 1.0 / n)}
        best = max(votes, key=lambda f: (votes[f], f == 1.0))
        self._whole.sure = 2 * votes[best] > len(ratios)
        return best if votes[best] >= max(1, len(ratios) // 5) else 1.0


def _snap_to_golden(value: Floats, golden: Floats) -> Floats:
    """Numbers that were put together, as the golden side has them where they differ by what putting together rounds."""
    with np.errstate(invalid="ignore"):  # -inf on both sides
        return np.asarray(np.where(np.abs(value - golden) <= ROUNDING * np.abs(golden), golden, value))
