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
        self.reset_tracking(GlobalTensors(copy(self._a.first), copy(self._b.first), self._structure, self._producers))
        self._whole.factor = self._factor() if factors else 1.0
        self._note_running()
        for at, (op, _) in enumerate(self._structure.pairs):
            self._record(op, self._rows[self._starts[at] : self._starts[at + 1]])
        return self._whole

    def join_turned(self, factors: bool = True) -> GlobalTensors:
        """As `join`, with the second run as the target."""
        return self.join(factors).swap_sides(self._partners, Tree(self._b.first).producers)

    def _record(self, op: int, rows: Sequence[tuple[int, int]]) -> None:
        side = self._a.first
        inside = self._first_backward < op <= self._last_backward and not self._is_forward(op)  # a function's own backward calls others
        if op > self._last_backward and op not in self._owned and self._a.tree.kinds[op] in self._various:
            for i, j in rows:
                self._skip(i, j, UPDATE)
            return
        call = Call(op, inside or self._a.tree.kinds[op][0] in ("backward", "parameters_grad"))
        self._written_before(op)
        for i, j in rows:
            if i in side.values and j in self._b.first.values:
                call.local |= self._argument(i, j, rows)
        for i, j in sorted(rows, key=lambda pair: side.role[pair[0]] in (OUTPUT, PARAMETERS_GRAD)):
            if isinstance(side.shape[i], list) != isinstance(self._b.first.shape[j], list):
                self._skip(i, j, UNCLEAR)  # given on one side only, as a bias that is added after the reduction
                continue
            if i in side.values or j in self._b.first.values or not isinstance(side.shape[i], list):
                continue
            call.cut |= self._row(call, i, j) and side.role[i] in (INPUT, PARAMETERS)
            if side.role[i] in (INPUT, PARAMETERS):
                call.tensors += 1
                call.lost += self._whole.skipped.get(i) == LOCAL
                call.parts += self._whole.skipped.get(i) in (LOCAL, PART)
            call.update |= self._whole.skipped.get(i) == UPDATE

    def _argument(self, i: int, j: int, rows: Sequence[tuple[int, int]]) -> bool:
        """Does an argument say where this rank is, or how large its piece is? Then it is no difference. `rows`: those of the call."""
        ours, theirs = self._a.values(i), self._b.values(j)
        most = max(len(self._a.pieces), len(self._b.pieces))
        after = self._last_backward < self._a.first.op[i]
        if all(one == ours[0] for one in ours) and all(one == theirs[0] for one in theirs):
            shares = self._whole.factor != 1.0 and self._a.first.op[i] > self._first_backward
            if ours[0] == theirs[0] or not (
                expected_differences.sizes(ours[0], theirs[0], most)
                or (shares and expected_differences.inverse(ours[0], theirs[0], self._whole.factor))
                or (self._is_forward(self._a.first.op[i]) and expected_differences.whole_share(ours[0], theirs[0], most))
                or self._says_fill(ours[0], theirs[0], rows)
            ):
                return False
        elif after and all(isinstance(one, float) for one in (*ours, *theirs)):
            pass  # one number of what this rank holds, as its part of a norm
        elif not all(isinstance(one, (int, list)) for one in (*ours, *theirs)):
            return False
        whole, golden = self._whole.target, self._whole.golden
        whole.values[i], whole.shape[i], whole.md5[i] = golden.values[j], golden.shape[j], golden.md5[j]
        whole.numbers[4 * i : 4 * i + 4] = golden.numbers[4 * j : 4 * j + 4]
        whole.nonfloat_stats.pop(i, None)
        if j in golden.nonfloat_stats:
            whole.nonfloat_stats[i] = golden.nonfloat_stats[j]
        return True

    def _says_fill(self, ours: Any, theirs: Any, rows: Sequence[tuple[int, int]]) -> bool:
        """Two whole numbers that are the sizes of a dimension of the call's tensors that one side fills up."""
        if type(ours) is not int or type(theirs) is not int or ours == theirs:
            return False
        shapes = [(self._a.first.shape[i], self._b.first.shape[j]) for i, j in rows]
        filled = [pair for pair in shapes if merge_statistics.is_padded(*pair, len(self._a.pieces))]
        return any((ours, theirs) in zip(*pair) for pair in filled)

    def _row(self, call: Call, i: int, j: int) -> bool:
        """Merge one pair of rows. Returns True when the row is a piece, or a part."""
        known = self._told_by_itself(call, i, j)
        if known is not None:
            return known
        first, second, op = self._a.first, self._b.first, call.op
        adds = call.backward and self._several and first.ops[op].split(".")[1] in ADDING
        if adds and first.role[i] == INPUT:
            self._skip(i, j, PART)  # the sum so far, and the share of one micro batch
            return True
        if first.role[i] == PARAMETERS_GRAD and self._gradients_are_local and (both := self._of_all_micro_batches(i, j)) is not None:
            mine, theirs = both
            for side, row, numbers, run in (
                (self._whole.target, i, _snap_to_golden(mine, theirs), self._a),
                (self._whole.golden, j, theirs, self._b),
            ):
                self._store_row(side, row, numbers, list(first.shape[i] or ()), len(run.pieces), run)
            return False
        if first.role[i] == PARAMETERS_GRAD and (both := self._means_of_shares(i, j)) is not None:
            self._part(call, i, j, self._a.members(i, True)[0])
            del self._whole.skipped[i]
            self._whole.by_mean.add(i)
            shape = list(first.shape[i] or ())
            self._store_row(self._whole.target, i, both[0], shape, 1, self._a, anyway=True)
            self._store_row(self._whole.golden, j, both[1], shape, 1, self._b, anyway=True)
            return True
        accumulated = first.role[i] == PARAMETERS_GRAD or (adds and first.role[i] == OUTPUT)
        others, _ = self._b.members(j, accumulated)
        pieces, places = self._a.members(i, accumulated)
        if self._last_backward < op and first.role[i] == INPUT and self._mark(i, pieces) in self._numbers:
            self._skip(i, j, UPDATE)
            return True
        if first.role[i] == INPUT and self._is_lost(i, pieces, others):
            self._skip(i, j, LOCAL)
            return False
        if self._here.is_partial(i) or self._there.is_partial(j):
            self._part(call, i, j, pieces)
            return True
        single = distances.elements(first.shape[i]) == distances.elements(second.shape[j]) == 1
        if single and self._last_backward < op and first.role[i] == INPUT and self._made_by_others(i, j):
            self._skip(i, j, UPDATE)
            return True
        if not single and len(others) and self._is_forward(op) and self._holds_shares(call, i, pieces, others):
            self._part(call, i, j, pieces)
            return True
        made: merge_statistics.Cut | None
        if single and self._is_forward(op) and self._is_unequal_mean(call, i, pieces, others):
            self._part(call, i, j, pieces)
            return True
        shares = self._shares_of_number(call, i, j, pieces, others) if single and (self._is_forward(op) or call.backward) else None
        if shares is not None:
            ours, theirs = merge_statistics.mean_of(pieces, shares[0]), merge_statistics.mean_of(others, shares[1])
            made = merge_statistics.Cut(first.shape[i], 1, 1, ours, theirs)
        else:
            made = merge_statistics.together(pieces, first.shape[i], others, second.shape[j], self._times_known(i, j, pieces))
        if made is None or made.golden is None:
            if self._is_local(call, i):
                self._lose(i, j, pieces, others)
            elif made is not None and made.value is not None and self._needs_sum(call, i, j, others, made):
                made = made._replace(golden=merge_statistics.farthest(others, made.other, made.value))  # summed on one side only
                self._note_unsummed(i, others)
            else:
                self._without_golden(call, i, j, pieces, others, made)
        if made is None or made.golden is None or i in self._whole.skipped:
            return made is None or made.need > 1 or made.value is None
        shape, need, golden, value = made.shape, made.need, made.golden, made.value
        call.shared |= first.role[i] == INPUT and need != made.other
        apart = need == len(pieces) > 1 and made.other == len(others) > 1  # no two pieces of either side say the same
        of_parts = call.parts > 0 and (apart or (call.backward and first.ops[op].split(".")[1] in ADDING))
        linear = call.backward and self._several and 0 < call.parts == call.tensors  # what is made of shares of micro batches alone
        forward = self._a.tree.kinds[op][0] == "forward"
        if first.role[i] == OUTPUT and (linear or (forward and (of_parts or (apart and call.elsewhere)))):
            self._part(call, i, j, pieces)
            return True
        if value is not None:
            self._times[i] = made.times
        same = first.shape[i] == second.shape[j]
        whole = same and need == made.other == 1 and call.backward and self._cuts_batch
        if value is None and whole and self._is_share(i, j, shape, golden):
            self._skip(i, j, PART)
            return True
        if value is None:
            value = self._of_unlike(call, i, j, made, accumulated)
            if value is None:
                return self._whole.skipped.get(i) != LOCAL
        update = single or call.update or (expected_differences.long(first.shape[i]) and op not in self._owned)
        update &= not (self._holds_all or (made.need == made.other == 1 and not expected_differences.long(first.shape[i])))
        update |= single and call.update  # made of what is not compared
        gives = op in self._owned and first.role[i] == OUTPUT and not single  # what a parameter's own update gives out is judged
        update &= not gives
        near = AGREES if not single else 0.0 if call.update else self._near
        if self._last_backward < op and update and merge_statistics.distance(value, golden) > near:
            self._numbers.add(self._mark(i, pieces))
            self._skip(i, j, UPDATE)
            return True
        if self._is_local(call, i) and (self._is_mask(i) or merge_statistics.distance(value, golden) > AGREES):
            self._lose(i, j, pieces, others)
            return False
        share = accumulated or (call.backward and self._several and same)  # of what has no part of the batch
        if share and merge_statistics.distance(value, golden) > AGREES and self._is_share(i, j, shape, golden):
            self._skip(i, j, PART)
            return True
        if op > self._shared_out and not gives and merge_statistics.distance(value, golden) > AGREES:
            self._skip(i, j, UPDATE)
            return True
        loss = self._is_forward(op) and distances.elements(first.shape[i]) == 1  # divided by the number of micro batches
        factor = self._whole.factor if call.backward or loss else 1.0
        if factor != 1.0 and merge_statistics.distance(value / factor, golden) < merge_statistics.distance(value, golden):
            value = value / factor
        if i not in self._whole.rank and first.shape[i] == second.shape[j] and merge_statistics.distance(value, golden) > AGREES:
            off = {self._a.pieces[places[at]].rank for at in merge_statistics.without_partner(pieces / factor, others, AGREES)}
            self._whole.rank.update((i, rank) for rank in off if len(off) == 1)
        if made.times > 1 and need == len(pieces) and first.role[i] == OUTPUT:
            self._parts.setdefault(pieces.tobytes(), op)  # pieces or parts: what takes it in will tell
        value = _snap_to_golden(value, golden)
        self._store_row(self._whole.target, i, value, shape, need, self._a)
        self._store_row(self._whole.golden, j, golden, shape, made.other, self._b)
        if need > 1:
            self._whole.made_of[i] = need
        return need > 1

    @cached_property
    def _holds_all(self) -> bool:
        """Every rank updates all of each parameter: what an update computes, to the last number, is the same in both layouts."""
        first, second = self._a.first, self._b.first
        behind = [(i, j) for i, j in self._rows if first.op[i] > self._last_backward and roundoff.eps(first.dtype[i])]
        tables = [(first.shape[i], second.shape[j]) for i, j in behind if isinstance(first.shape[i], list) and len(first.shape[i]) > 1]
        return bool(tables) and self._shared_out == len(first.ops) and all(mine == theirs for mine, theirs in tables)

    @cached_property
    def _buffers(self) -> set[int]:
        """Calls of no module that put gradients into flat buffers and take them out: what lies in a buffer, and after which micro batch,
        each layout decides by itself."""
        side, found = self._a.first, set[int]()
        for op, (direction, *_, api) in enumerate(self._a.tree.kinds):
            if direction == "forward" and len(self._a.tree.kinds[op]) == 3 and api in _OF_BUFFERS:
                rows = (row for row in side.rows(op) if roundoff.eps(side.dtype[row]))
                if any(isinstance(side.shape[row], list) and len(side.shape[row] or ()) == 1 for row in rows):
                    found.add(op)
        return found

    def _shares_of_number(self, call: Call, i: int, j: int, pieces: Floats, others: Floats) -> tuple[int, int] | None:
        """A number of each piece (tokens counted, a loss over a part of the batch): how many of them make that of the whole, on each side.
        None: all pieces of a side say the same, and nothing that was cut goes in."""
        number = self._number(i, pieces, others)
        alike = all(merge_statistics.merge_replicas(side, 1) is not None for side in (pieces, others))
        if self._a.first.role[i] != OUTPUT and not call.backward:
            if number not in self._shares and not alike and not self._is_made_by_both(i, j):
                self._shares[number] = merge_statistics.shares(pieces, others, self._agrees)
            found = self._shares.get(number, None if alike else (1, 1))
            call.shared |= found is not None
            call.scaled |= found not in (None, (1, 1))
            return found
        if alike and not (call.cut or call.shared or call.parts or call.backward):
            return None
        found = merge_statistics.shares(pieces, others, self._agrees)
        self._shares[number] = found
        return None if alike and found == (1, 1) else found

    @cached_property
    def _parameters(self) -> dict[parameter_owner.Owner, Any]:
        """The shapes of parameters that modules show."""
        first, kinds = self._a.first, self._a.tree.kinds
        rows = (row for row in range(len(first)) if first.role[row] == PARAMETERS)
        return {parameter_owner.owner_of(first, row, kinds[first.op[row]]): first.shape[row] for row in rows}

    def _is_made_by_both(self, i: int, j: int) -> bool:
        """What a row holds was given out by one record that both sides have."""
        mine, theirs = self._producers.get(i), self._golden_producers.get(j)
        return mine is not None and theirs is not None and self._records.get(mine) == theirs

    def _made_by_others(self, i: int, j: int) -> bool:
        """What a row holds was given out by calls of two kinds: runs that clip gradients by other code pair numbers that are not of one
        meaning."""
        mine, theirs = self._producers.get(i), self._golden_producers.get(j)
        return mine is not None and theirs is not None and self._a.tree.kinds[mine] != self._b.tree.kinds[theirs]

    def _needs_sum(self, call: Call, i: int, j: int, others: Floats, made: merge_statistics.Cut) -> bool:
        """The target has a sum where the golden side has parts, in a call that takes in no parts."""
        if self._is_forward(call.op):
            return not self._is_golden_part(call, i, j, others)
        return self._a.first.role[i] == INPUT and made.other == 1 and self._updates(call.op)

    def _note_unsummed(self, i: int, parts: Floats) -> None:
        if (source := self._parts.get(parts.tobytes())) is not None:
            self._whole.source[i] = source
            self._whole.unsummed.add(i)

    def _updates(self, op: int) -> bool:
        """A call of the update of one parameter, where each rank has all of it."""
        return self._last_backward < op <= self._shared_out and op in self._owned

    def _holds_shares(self, call: Call, i: int, pieces: Floats, others: Floats) -> bool:
        """A tensor with numbers in it of which each piece has its share, as a loss and the tokens it is a sum over, side by side."""
        number = self._number(i, pieces, others)
        if self._a.first.role[i] != OUTPUT:
            return number in self._shares
        if not call.scaled or (found := merge_statistics.shares(pieces, others, self._agrees)) == (1, 1):
            return False
        self._shares[number] = found
        return True

    def _is_unequal_mean(self, call: Call, i: int, pieces: Floats, others: Floats) -> bool:
        """A number made of shares, or a mean over the labels that count, that is neither the sum nor the mean of the pieces' numbers, and
        may be a mean with unlike weights."""
        counted = call.cut and self._a.first.ops[call.op].split(".")[1] in traits.LOSSES_OF_LABELS
        if self._a.first.role[i] != OUTPUT or not (counted or call.scaled or call.parts) or min(len(pieces), len(others)) < 1:
            return False
        near = merge_statistics.SAME if counted else self._near
        means = merge_statistics.distance(merge_statistics.mean_of(pieces), merge_statistics.mean_of(others))
        fits = means <= near or merge_statistics.shares(pieces, others, near) != (1, 1)
        return not fits and merge_statistics.may_be_means(pieces, others)

    def _number(self, i: int, pieces: Floats, others: Floats) -> tuple[tuple[str, int], bytes, bytes]:
        return self._kind(i), pieces.tobytes(), others.tobytes()

    def _of_unlike(self, call: Call, i: int, j: int, made: merge_statistics.Cut, accumulated: bool) -> Floats | None:
        """Statistics of the whole where the replicas of the target do not agree; None when the row is left out for it."""
        first, op, golden = self._a.first, call.op, made.golden
        assert golden is not None
        single = distances.elements(first.shape[i]) == distances.elements(self._b.first.shape[j]) == 1
        pieces, places = self._a.members(i, accumulated)
        if single and (number := merge_statistics.number_of(pieces, golden, self._near)) is not None:
            return number
        value, place = merge_statistics.odd_one(pieces, made.need, golden, self._whole.factor if call.backward else 1.0, AGREES)
        if value is not None:
            self._whole.rank[i] = self._a.pieces[places[place]].rank
            return value
        if op > self._last_backward and (single or (call.update and self._part_taken(op) < 0)):
            self._numbers.add(self._mark(i, pieces))
            self._skip(i, j, UPDATE)
        elif single and self._is_forward(op):
            return merge_statistics.mean_or_sum(pieces, golden)  # a loss over pieces of the batch
        elif self._is_local(call, i):
            self._lose(i, j, pieces, self._b.members(j, accumulated)[0])
        elif op > self._shared_out:
            self._skip(i, j, UPDATE)
        elif self._updates(op) and made.need == made.other == 1 and len(pieces) > 1 and first.role[i] == INPUT:
            self._note_unsummed(i, pieces)
            far = max(merge_statistics.distance(one, pieces[0]) for one in pieces[1:])
            owner = self._owned[op]
            if far > self._agrees and first.shape[i] == self._parameters.get(owner) and not experts.EXPERT.match(owner[0]):
                self._whole.apart.add(i)
            return merge_statistics.farthest(pieces, made.need, golden)
        elif not made.sure or self._is_part(call, i, pieces) or self._masked_gradient(i):
            self._part(call, i, j, pieces)
        elif call.backward and (filled := merge_statistics.zeros_elsewhere(pieces, golden, AGREES)) is not None:
            call.cut |= first.role[i] == INPUT  # what is made of it is a part
            return filled
        else:
            return merge_statistics.farthest(pieces, made.need, golden)
        return None

    def _told_by_itself(self, call: Call, i: int, j: int) -> bool | None:
        """What `_row` returns, of rows whose kind or shape says it, without a look at the numbers; None: the numbers have to tell."""
        first, second, op = self._a.first, self._b.first, call.op
        if expected_differences.random_state(first.dtype[i], first.shape[i]):
            self._skip(i, j, RANDOM)
            return False
        if NOTHING in (first.nonfloat_stats.get(i), second.nonfloat_stats.get(j)):
            self._skip(i, j, EMPTY)
            return False
        if SHARE in first.extra.get(i, ()) or SHARE in second.extra.get(j, ()):
            self._skip(i, j, PART)
            return True
        if call.backward and op in self._buffers:
            self._skip(i, j, PART)
            return False
        unlike = merge_statistics.whole_shape(first.shape[i], second.shape[j]) is None
        if self._experts or unlike:  # where only functions are recorded no name tells of experts
            if experts.LISTED in first.extra.get(i, ()) or experts.LISTED in second.extra.get(j, ()):
                self._skip(i, j, TOKENS)
                return False
            found = experts.tokens(self._a.everywhere(i), self._b.everywhere(j))
            if found is not None:
                return self._tokens(call, i, j, found)
            if op in self._around and self._other_groups(i, j):
                self._skip(i, j, TOKENS)
                return False
        if call.backward and first.role[i] == OUTPUT and self._takes_other_tokens(op):
            self._skip(i, j, TOKENS)
            return False
        if unlike:
            flat = len(first.shape[i]) == len(second.shape[j]) == 1
            own = self._producers.get(i) is None and (call.buffer or not call.tensors)
            if flat and (own or (call.backward and self._a.tree.kinds[op][0] == "forward")):
                call.buffer = True
                self._skip(i, j, UNCLEAR)  # a flat buffer of what lies on this rank
                return False
            pads = merge_statistics.is_padded(first.shape[i], second.shape[j], len(self._a.pieces))
            call.elsewhere |= pads
            if pads and self._is_forward(op) and self._filled_up(i, j):
                return True
            update = call.update or (self._last_backward < op and expected_differences.long(first.shape[i]))
            moved = call.backward and first.ops[op].split(".")[1] in traits.MOVES  # buffers of gradients, which each layout has of its own
            if pads or call.cut or update or moved or (op > self._last_backward and op not in self._owned):
                self._skip(i, j, PADDED if pads else UPDATE if update else UNCLEAR)
            return pads
        if self._is_running(call, i):
            self._skip(i, j, PART)
            return True
        return None

    def _tokens(self, call: Call, i: int, j: int, found: experts.Tokens) -> bool:
        """Merge rows with a row per token. Returns True: they are pieces."""
        numbers = not roundoff.eps(self._a.first.dtype[i])  # places of tokens, which are other ones on each rank
        if found.target is None or found.golden is None or (numbers and not merge_statistics.close(found.target, found.golden)):
            self._skip(i, j, TOKENS)
            return True
        value, golden, factor = found.target, found.golden, self._whole.factor
        if call.backward and merge_statistics.distance(value / factor, golden) < merge_statistics.distance(value, golden):
            value = value / factor
        value = _snap_to_golden(value, golden)
        self._store_row(self._whole.target, i, value, found.shape, 2, self._a)
        self._store_row(self._whole.golden, j, golden, found.shape, 2, self._b)
        self._whole.made_of[i] = found.pieces
        return True

    def _takes_other_tokens(self, op: int) -> bool:
        """All that goes into a record is of tokens that the other side has in other groups."""
        side = self._a.first
        taken = [
            row for row in side.rows(op) if side.role[row] == INPUT and isinstance(self._whole.target.shape[row] or side.shape[row], list)
        ]
        return bool(taken) and all(self._whole.skipped.get(row) == TOKENS for row in taken)

    def _other_groups(self, i: int, j: int) -> bool:
        """Counts and places of tokens, in the calls that exchange them, that are not the same: each layout has groups of its own."""
        first, second = self._a.first, self._b.first
        if merge_statistics.whole_shape(first.shape[i], second.shape[j]) is None:
            return True
        if roundoff.eps(first.dtype[i]):
            return False
        ours, theirs = (np.array([stats for _, stats in run.everywhere(row)]) for run, row in ((self._a, i), (self._b, j)))
        return len(ours) != len(theirs) or not merge_statistics.close(
            merge_statistics.merge_pieces(ours), merge_statistics.merge_pieces(theirs)
        )

    def _filled_up(self, i: int, j: int) -> bool:
        """A table with more rows than the other side's holds at least what that one holds; True when it could be said."""
        first, second = self._a.first, self._b.first
        whole = merge_statistics.filled_up(self._a.members(i, False)[0], first.shape[i], self._b.members(j, False)[0], second.shape[j])
        if whole is None or whole.value is None or whole.golden is None:
            return False
        self._store_row(self._whole.target, i, whole.value, whole.shape, whole.need, self._a, True)
        self._store_row(self._whole.golden, j, whole.golden, whole.shape, whole.other, self._b, True)
        self._whole.made_of[i] = whole.need
        return True

    def _times_known(self, i: int, j: int, pieces: Floats) -> int | None:
        """How often a row is cut more than the shapes say: as the dumps have recorded it, else as what it is a gradient of."""
        if self._mark(i, pieces) in self._partial:
            return 1
        least = merge_statistics.whole_shape(self._a.first.shape[i], self._b.first.shape[j])
        recorded = None
        if least is not None and self._a.first.role[i] in (INPUT, PARAMETERS):
            recorded = placements.times_cut(self._here, i, self._there, j, least)
        return recorded or self._times_of_twin(i, j)

    def _times_of_twin(self, i: int, j: int) -> int | None:
        """Gradients are cut as what they are gradients of: how often the forward row of a backward one, and a parameter, was cut more
        than the shapes say."""
        twin = self._twins.get(i)
        if twin is None or self._a.first.shape[twin] != self._a.first.shape[i]:
            return None
        partner = self._partners.get(twin)
        return self._times.get(twin) if partner is not None and self._b.first.shape[partner] == self._b.first.shape[j] else None

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
        first, second = self._a.first, self._b.first
        for i, j in self._rows:
            if first.role[i] != INPUT or self._a.tree.kinds[first.op[i]][0] != "backward" or not first.shape[i] or not second.shape[j]:
                continue
            made = merge_statistics.together(self._a.members(i, False)[0], first.shape[i], self._b.members(j, False)[0], second.shape[j])
            if made is None or made.value is None or made.golden is None or made.shape == first.shape[i] == second.shape[j]:
                continue
            if made.value[3] > 0 and made.golden[3] > 0:
                ratios.append(made.value[3] / made.golden[3])
        if not ratios:
            return 1.0
        # a vote, not the middle: behind a defect in the backward pass all gradients have another ratio
        most = max(len(self._a.pieces), len(self._b.pieces))
        found = np.asarray(ratios)
        votes = {f: int((np.abs(found / f - 1) < self._agrees).sum()) for n in range(1, most + 1) for f in (float(n), 1.0 / n)}
        best = max(votes, key=lambda f: (votes[f], f == 1.0))
        self._whole.sure = 2 * votes[best] > len(ratios)
        return best if votes[best] >= max(1, len(ratios) // 5) else 1.0


def _snap_to_golden(value: Floats, golden: Floats) -> Floats:
    """Numbers that were put together, as the golden side has them where they differ by what putting together rounds."""
    with np.errstate(invalid="ignore"):  # -inf on both sides
        return np.asarray(np.where(np.abs(value - golden) <= ROUNDING * np.abs(golden), golden, value))
