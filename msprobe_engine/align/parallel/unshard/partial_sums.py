"""What becomes of parts of a sum, and of what says something of one rank only, on their way through the calls.

Replicas that disagree are either parts of a sum that is still to come, which cannot be compared, or a fault. They are parts when the call
has taken in something cut (a product over a cut dimension), or has only passed on such a part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from msprobe_engine.align.calls.call_tree import calls_function
from msprobe_engine.align.calls.structure import ADDING
from msprobe_engine.align.parallel import merge_statistics
from msprobe_engine.align.parallel.merge_statistics import Floats
from msprobe_engine.align.parallel.unshard.layout_pair import LayoutPair
from msprobe_engine.align.parallel.unshard.plan import LOCAL, PART, MergePlan
from msprobe_engine.core import operator_traits as traits
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD
from msprobe_engine.measure import distances, roundoff

PASSING = frozenset(
    (
        *("to", "float", "half", "bfloat16", "double", "type", "type_as", "clone", "detach", "contiguous"),
        *("view", "view_as", "reshape", "transpose", "t", "permute", "flatten", "unflatten", "squeeze", "unsqueeze"),
    )
)
"""Calls that hand on what they got: a part stays a part."""

_IN_PLACE = re.compile(r"__setitem__|__i(?!nvert)\w+__|[a-z]\w*[a-z]_")
"""Names of calls that write into their first argument."""

_Mark = tuple[tuple[str, int], bytes]


@dataclass
class Call:
    """What is known of a record while its rows are put together: outputs come last.

    Attributes:
        cut: something that is cut, or a part, goes in.
        local: an argument says where this rank is.
        update: a number of the update goes in that cannot be compared.
        tensors, lost, parts: how many tensors go in, how many of them say something of one rank only, and how many say that or are parts.
        buffer: the first of them is a flat buffer of what lies on this rank.
        shared: what is cut on one side alone goes in, or a number of each piece: what comes out may be one, too.
        scaled: a number goes in of which each piece has its share.
        elsewhere: a table that is filled up goes in, and is cut at other rows than the other side's: each rank has looked up other tokens.
    """

    op: int
    backward: bool
    cut: bool = False
    local: bool = False
    update: bool = False
    tensors: int = 0
    lost: int = 0
    parts: int = 0
    buffer: bool = False
    shared: bool = False
    scaled: bool = False
    elsewhere: bool = False


class PartialSums:
    """Follows the target's tensors, record by record, and says in the plan which rows are left out for it."""

    def __init__(self, pair: LayoutPair, plan: MergePlan) -> None:
        self._pair, self._plan = pair, plan
        self._given_by: dict[bytes, int] = {}  # statistics of parts -> the latest record that gave them out
        self._partial: set[_Mark] = set()
        self._lost: set[_Mark] = set()
        self._masks: set[int] = set()
        self._written: dict[tuple[str, int], int | None] = {}
        self._extra = set(pair.structure.only_target)
        self._next = 0
        self._running = self._find_running()

    def mark(self, i: int, pieces: Floats) -> _Mark:
        """Tells one tensor from others."""
        return self._pair.kind(i), pieces.tobytes()

    def note_written_before(self, op: int) -> None:
        """Calls up to this record that write into a part, or into what says something of one rank: it stays one, with other numbers."""
        pair = self._pair
        if not pair.is_forward(op):
            self._written.clear()
        while self._next < op:
            call, self._next = self._next, self._next + 1
            if not _IN_PLACE.fullmatch(pair.side.ops[call].split(".")[1]) or pair.kinds[call][0] != "forward":
                continue
            taken = pair.target.tree.tensors_in(call)
            if not taken:
                continue
            row = taken[0]
            pieces = pair.target.members(row, False)[0]
            if pieces.tobytes() in self._given_by or self.mark(row, pieces) in self._lost or self._takes_running(call):
                self._written[pair.kind(row)] = self._given_by.get(pieces.tobytes())

    def is_running(self, call: Call, i: int) -> bool:
        """A single number that is added up over micro batches outside of the backward pass, as a loss for the log, or a buffer that it is
        written into."""
        pair, kind = self._pair, self._pair.side.ops[call.op].split(".")[1]
        if not pair.several or call.backward or i in pair.side.values:
            return False
        if kind in ADDING:
            return distances.elements(pair.side.shape[i]) == 1
        if pair.side.role[i] == INPUT and distances.elements(pair.side.shape[i]) == 1 and self._goes_on(call.op, i):
            return True
        return kind in ("__getitem__", "__setitem__") and self._takes_running(call.op)

    def _goes_on(self, op: int, i: int) -> bool:
        """Each micro batch of a rank takes in here what the one before it has given out there, as ``total = total + loss`` does."""
        run, side = self._pair.target, self._pair.side
        taken, places = run.members(i, False)
        ranks = [run.pieces[place].rank for place in places]
        later = [n for n in range(1, len(ranks)) if ranks[n] == ranks[n - 1]]
        outputs = (row for row in side.rows(op) if side.role[row] == OUTPUT and side.shape[row] == side.shape[i])
        given = [run.members(row, False)[0] for row in outputs] if later else []
        return any(len(out) == len(taken) and all(np.array_equal(taken[n], out[n - 1]) for n in later) for out in given)

    def _find_running(self) -> set[bytes]:
        """Those numbers, and the buffers."""
        pair, side = self._pair, self._pair.side
        self._running = running = set[bytes]()
        for op in range(pair.first_backward if pair.several else 0):
            kind, rows = side.ops[op].split(".")[1], [row for row in side.rows(op) if isinstance(side.shape[row], list)]
            if kind in ADDING:
                added = [row for row in rows if side.role[row] == OUTPUT and distances.elements(side.shape[row]) == 1]
                running.update(pair.target.members(row, False)[0].tobytes() for row in added)
                # a number that was taken from a buffer before
                for before in range(max(0, op - 4), op if added else 0):
                    if side.ops[before].split(".")[1] == "__getitem__" and isinstance(side.shape[side.rows(before).start], list):
                        running.add(pair.target.members(side.rows(before).start, False)[0].tobytes())
            elif kind == "__setitem__" and self._takes_running(op):
                running.add(pair.target.members(rows[0], False)[0].tobytes())
        return running

    def _takes_running(self, op: int) -> bool:
        side = self._pair.side
        rows = (row for row in side.rows(op) if row not in side.values) if self._running else ()
        return any(self._pair.target.members(row, False)[0].tobytes() in self._running for row in rows)

    def is_local(self, call: Call, i: int) -> bool:
        """What a call gives out that was told where this rank is: masks and indices, or something made of the arguments alone."""
        side = self._pair.side
        blind = call.lost == call.tensors  # nothing else goes in
        places = call.cut and side.ops[call.op].split(".")[1] in traits.SORTS and len(side.shape[i] or ()) == 1
        if places and side.role[i] == OUTPUT and not roundoff.eps(side.dtype[i]):
            return True
        return side.role[i] == OUTPUT and (call.local or call.lost > 0) and (not roundoff.eps(side.dtype[i]) or blind)

    def lose(self, i: int, pieces: Floats, golden_pieces: Floats) -> None:
        """Leave out a row that says something of one rank only."""
        if self._pair.is_mask(i):
            self._masks.add(self._pair.side.op[i])
        else:
            self._lost.update((self.mark(i, pieces), self.mark(i, golden_pieces)))
        self._plan.skipped[i] = LOCAL

    def is_lost(self, i: int, pieces: Floats, golden_pieces: Floats) -> bool:
        """Does that come from what only says something of one rank, maybe written into since?"""
        pair = self._pair
        if self.mark(i, pieces) in self._lost or self.mark(i, golden_pieces) in self._lost:
            return True
        if pair.is_mask(i) and pair.producers.get(i) in self._masks:
            return True
        if pair.producers.get(i) is None and self._written.get(pair.kind(i), -1) is None:
            self._lost.add(self.mark(i, pieces))
            del self._written[pair.kind(i)]
            return True
        return False

    def is_masked_gradient(self, i: int) -> bool:
        """Of a part of which the forward pass has zeroed what belongs to other ranks: the backward pass does it too, in place."""
        twin = self._pair.twins.get(i)
        part = twin is not None and self._plan.skipped.get(twin) == PART
        return part and self._pair.side.role[i] == INPUT and self._pair.producers.get(i) is None

    def is_part(self, call: Call, i: int, pieces: Floats) -> bool:
        """Are pieces of the target that disagree parts of a sum?"""
        pair, side, op = self._pair, self._pair.side, call.op
        if pieces.tobytes() in self._given_by or side.role[i] == PARAMETERS_GRAD:
            return True
        if side.role[i] in (INPUT, PARAMETERS):
            if roundoff.eps(side.dtype[i]) == 0 and side.role[i] == INPUT and pair.has_cut_table(op, i):
                return True  # tokens of other ranks are masked
            producer = pair.producers.get(i)
            if producer is None and self._written.get(pair.kind(i)) is not None:
                return True
            return producer in self._extra  # made by what only this layout does
        if self.part_taken(op) >= 0:
            return self._hands_on(call)
        return call.cut and not pair.target.tree.children.get(op)

    def is_reduced(self, call: Call, i: int) -> bool:
        """A function takes in what is cut and gives out fewer dimensions, none of them cut: it has gone over the cut one, as the largest
        logit of a part of the vocabulary. One of the ranks may have the number of the whole, and is no replica that agrees."""
        side = self._pair.side
        if not call.cut or side.role[i] != OUTPUT or not calls_function(self._pair.kinds[call.op]):
            return False
        taken = (row for row in side.rows(call.op) if side.role[row] == INPUT and row not in side.values)
        return len(side.shape[i] or ()) < max((len(side.shape[row] or ()) for row in taken), default=0)

    def is_golden_part(self, call: Call, i: int, j: int, golden_pieces: Floats) -> bool:
        """As `is_part`, of the golden side, where the target has the sum: a row of a part that something only that side does has made, or
        that was written into, too."""
        pair = self._pair
        if pair.side.role[i] != OUTPUT:
            producer = pair.golden_producers.get(j)
            return golden_pieces.tobytes() in self._given_by or producer is None or producer in pair.golden_extra
        return self.is_part(call, i, golden_pieces)

    def is_noted(self, i: int, pieces: Floats) -> bool:
        """Was that tensor left out as a part before?"""
        return self.mark(i, pieces) in self._partial

    def leave_out(self, call: Call, i: int, pieces: Floats) -> None:
        """Leave out a row of parts, and remember which record gave them out."""
        pair, op = self._pair, call.op
        self._partial.add(self.mark(i, pieces))
        key = pieces.tobytes()
        if pair.side.role[i] in (OUTPUT, PARAMETERS_GRAD):
            taken = self.part_taken(op)
            if taken >= 0 and self._hands_on(call):
                self._given_by.setdefault(key, self._plan.source[taken])
            elif len(pair.kinds[self._given_by.get(key, op)]) != 4 or key not in self._given_by:  # the innermost module around it
                self._given_by[key] = op
        elif key in self._given_by:
            self._plan.source[i] = self._given_by[key]
        elif pair.producers.get(i) is None and (source := self._written.pop(pair.kind(i), None)) is not None:
            self._plan.source[i] = self._given_by[key] = source
        self._plan.skipped[i] = PART

    def leave_out_golden(self, call: Call, i: int, pieces: Floats, golden_pieces: Floats, made: merge_statistics.Cut | None) -> None:
        """The golden side has parts of a sum here, or what cannot be put together; where the target has parts too, it is told by them."""
        if made is None or made.value is None:
            self.leave_out(call, i, pieces)
        elif self._pair.is_forward(call.op):
            self.leave_out(call, i, golden_pieces)
        else:
            self._plan.skipped[i] = PART

    def note_possible_parts(self, pieces: Floats, op: int) -> None:
        """What a record gives out is pieces or parts: what takes it in will tell."""
        self._given_by.setdefault(pieces.tobytes(), op)

    def note_unsummed(self, i: int, parts: Floats) -> None:
        """A row is compared although it is of parts: nobody has summed them up."""
        if (source := self._given_by.get(parts.tobytes())) is not None:
            self._plan.source[i] = source
            self._plan.unsummed.add(i)

    def part_taken(self, op: int) -> int:
        """A row with a part that goes into a record; -1."""
        side = self._pair.side
        return next((row for row in side.rows(op) if side.role[row] == INPUT and row in self._plan.source), -1)

    def _hands_on(self, call: Call) -> bool:
        """What comes out of a part that goes in alone is a part, whatever is done with it, and so are a part times what all ranks have, and
        the sum of gradients so far."""
        name = self._pair.side.ops[call.op].split(".")[1]
        forward = self._pair.kinds[call.op][0] == "forward"
        alone = forward and call.parts == call.tensors
        times = forward and call.parts == 1 and not call.lost and name in traits.SCALINGS
        times = times and ("mul" in name or self.part_taken(call.op) == self._pair.side.rows(call.op).start)
        return name in PASSING or alone or times or call.update or (call.backward and name in ADDING)
