"""Rows whose kind or shape says what becomes of them, before the numbers of the pieces are put together."""

from __future__ import annotations

import numpy as np

from msprobe_engine.align.parallel import expected_differences, experts, merge_statistics
from msprobe_engine.align.parallel.tied_embeddings import SHARE
from msprobe_engine.align.parallel.unshard.layout_pair import LayoutPair
from msprobe_engine.align.parallel.unshard.partial_sums import Call, PartialSums
from msprobe_engine.align.parallel.unshard.plan import EMPTY, PADDED, PART, RANDOM, TOKENS, UNCLEAR, UPDATE, MergedRow, MergePlan
from msprobe_engine.core import operator_traits as traits
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT
from msprobe_engine.measure import roundoff

_NOTHING = (None, None, None, None)


class RowsByKind:
    """Random states, empty tensors, buffers of gradients, tokens in other groups, tables that are filled up."""

    def __init__(self, pair: LayoutPair, plan: MergePlan, sums: PartialSums) -> None:
        self._pair, self._plan, self._sums = pair, plan, sums

    def decide(self, call: Call, i: int, j: int) -> bool | None:
        """Is the row a piece or a part (True), or nothing of the kind (False)? None: the numbers have to tell."""
        pair, side, golden_side, skipped = self._pair, self._pair.side, self._pair.golden_side, self._plan.skipped
        if expected_differences.random_state(side.dtype[i], side.shape[i]):
            skipped[i] = RANDOM
            return False
        if _NOTHING in (side.nonfloat_stats.get(i), golden_side.nonfloat_stats.get(j)):
            skipped[i] = EMPTY
            return False
        if SHARE in side.extra.get(i, ()) or SHARE in golden_side.extra.get(j, ()):
            skipped[i] = PART
            return True
        unlike = merge_statistics.whole_shape(side.shape[i], golden_side.shape[j]) is None
        if (call.op in pair.buffers and (call.backward or unlike)) or (unlike and pair.is_average(call.op)):
            skipped[i] = PART
            return False
        if pair.experts or unlike:  # where only functions are recorded no name tells of experts
            if experts.LISTED in side.extra.get(i, ()) or experts.LISTED in golden_side.extra.get(j, ()):
                skipped[i] = TOKENS
                return False
            tokens = experts.tokens(pair.target.everywhere(i), pair.golden.everywhere(j))
            if tokens is not None:
                self._merge_tokens(call, i, tokens)
                return True
            if call.op in pair.around and self._other_groups(i, j):
                skipped[i] = TOKENS
                return False
        if call.backward and side.role[i] == OUTPUT and self._takes_other_tokens(call.op):
            skipped[i] = TOKENS
            return False
        if unlike:
            return self._decide_unlike(call, i, j)
        if self._sums.is_running(call, i):
            skipped[i] = PART
            return True
        return None

    def _decide_unlike(self, call: Call, i: int, j: int) -> bool:
        """Of two shapes that are no pieces of one tensor."""
        pair, side, golden_side, op, skipped = self._pair, self._pair.side, self._pair.golden_side, call.op, self._plan.skipped
        flat = len(side.shape[i]) == len(golden_side.shape[j]) == 1
        if side.role[i] == OUTPUT and not call.tensors and pair.is_forward(op):
            skipped[i] = UNCLEAR  # made of arguments alone: each loop makes tensors of its own, and what takes them in is compared
            return False
        own = pair.producers.get(i) is None and (call.buffer or not call.tensors)
        if flat and (own or (call.backward and pair.kinds[op][0] == "forward")):
            call.buffer = True
            skipped[i] = UNCLEAR  # a flat buffer of what lies on this rank
            return False
        pads = merge_statistics.is_padded(side.shape[i], golden_side.shape[j], len(pair.target.pieces))
        call.elsewhere |= pads
        if pads and pair.is_forward(op) and self._merge_filled_up(i, j):
            return True
        update = call.update or (pair.last_backward < op and expected_differences.long(side.shape[i]))
        moved = call.backward and side.ops[op].split(".")[1] in traits.MOVES  # buffers of gradients, which each layout has of its own
        if pads or call.cut or update or moved or (op > pair.last_backward and op not in pair.owned):
            skipped[i] = PADDED if pads else UPDATE if update else UNCLEAR
        return pads

    def _merge_tokens(self, call: Call, i: int, tokens: experts.Tokens) -> None:
        """Rows with a row per token."""
        numbers = not roundoff.eps(self._pair.side.dtype[i])  # places of tokens, which are other ones on each rank
        if tokens.target is None or tokens.golden is None or (numbers and not merge_statistics.close(tokens.target, tokens.golden)):
            self._plan.skipped[i] = TOKENS
            return
        value, golden, factor = tokens.target, tokens.golden, self._plan.factor
        if call.backward and merge_statistics.distance(value / factor, golden) < merge_statistics.distance(value, golden):
            value = value / factor
        self._plan.merged[i] = MergedRow(merge_statistics.snap(value, golden), golden, tokens.shape, 2, 2)
        self._plan.made_of[i] = tokens.pieces

    def _takes_other_tokens(self, op: int) -> bool:
        """All that goes into a record is of tokens that the other side has in other groups."""
        side = self._pair.side
        taken = [row for row in side.rows(op) if side.role[row] == INPUT and isinstance(side.shape[row], list)]
        return bool(taken) and all(self._plan.skipped.get(row) == TOKENS for row in taken)

    def _other_groups(self, i: int, j: int) -> bool:
        """Counts and places of tokens, in the calls that exchange them, that are not the same: each layout has groups of its own."""
        pair = self._pair
        if merge_statistics.whole_shape(pair.side.shape[i], pair.golden_side.shape[j]) is None:
            return True
        if roundoff.eps(pair.side.dtype[i]):
            return False
        target_stats, golden_stats = (
            np.array([stats for _, stats in run.everywhere(row)]) for run, row in ((pair.target, i), (pair.golden, j))
        )
        return len(target_stats) != len(golden_stats) or not merge_statistics.close(
            merge_statistics.merge_pieces(target_stats), merge_statistics.merge_pieces(golden_stats)
        )

    def _merge_filled_up(self, i: int, j: int) -> bool:
        """A table with more rows than the other side's holds at least what that one holds; True when it could be said."""
        pair = self._pair
        whole = merge_statistics.filled_up(
            pair.target.members(i, False)[0], pair.side.shape[i], pair.golden.members(j, False)[0], pair.golden_side.shape[j]
        )
        if whole is None or whole.value is None or whole.golden is None:
            return False
        self._plan.merged[i] = MergedRow(whole.value, whole.golden, whole.shape, whole.need, whole.other, always=True)
        self._plan.made_of[i] = whole.need
        return True
