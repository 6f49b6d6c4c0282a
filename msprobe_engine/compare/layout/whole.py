"""Two runs of different layouts as two sides of the same shapes: each row of the whole from the rows of its pieces.

What a row is a piece of follows from the shapes of both sides: a dimension that is a multiple on the other side is cut, equal shapes are
replicas. Replicas that disagree are either parts of a sum that is still to come, which cannot be compared, or a fault. They are parts when
the call has taken in something cut (a product over a cut dimension), or has only passed on such a part.
"""

from __future__ import annotations

import dataclasses
import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from msprobe_engine.compare.layout import experts, merge, owners, placements
from msprobe_engine.compare.layout.merge import Floats
from msprobe_engine.compare.layout.pieces import ADDING, Piece, last_backward
from msprobe_engine.compare.layout.shares import SHARE
from msprobe_engine.compare.side import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, Side
from msprobe_engine.compare.structure import Matcher, Structure
from msprobe_engine.compare.tree import Kind, Producers, Shapes, Tree
from msprobe_engine.diagnose import facts, measure

AGREES = 1e-3
"""Closer than this a replica is taken for the right one when replicas disagree."""

NEAR = 1e-5
"""The same, of single numbers."""

ROUNDING = 2.0**-46
"""Adding up pieces in float64 moves the last bits; integers must stay equal."""

PASSING = frozenset(
    (
        *("to", "float", "half", "bfloat16", "double", "type", "type_as", "clone", "detach", "contiguous"),
        *("view", "view_as", "reshape", "transpose", "t", "permute", "flatten", "unflatten", "squeeze", "unsqueeze"),
    )
)
"""Calls that hand on what they got: a part stays a part."""

PART, PADDED, UNCLEAR, UPDATE = "parts of a sum", "padded", "of other shapes", "single numbers of the update"
EMPTY, LOCAL, RANDOM = "without statistics", "of one rank alone", "states of random numbers"
TOKENS = "tokens in other groups"
"""Why a row cannot be compared."""

_NOTHING = (None, None, None, None)

IN_PLACE = re.compile(r"__setitem__|__i(?!nvert)\w+__|[a-z]\w*[a-z]_")
"""Names of calls that write into their first argument."""


_Mark = tuple[tuple[str, int], bytes]


class LooseTree(Tree):
    """Dimensions differ between layouts; their number and the dtype do not."""

    def shapes(self, op: int) -> Shapes:
        """dtypes and numbers of dimensions."""
        inputs, outputs = super().shapes(op)
        return Shapes(tuple(map(_loose, inputs)), tuple(map(_loose, outputs)))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """In the order in which they began: when autograd says that a module's backward pass is over differs between layouts."""
        begins = list(range(len(self.parents)))
        for op, parent in enumerate(self.parents):
            while parent >= 0 and begins[parent] > begins[op]:
                begins[parent] = begins[op]
                parent = self.parents[parent]
        return {parent: sorted(inside, key=begins.__getitem__) for parent, inside in super().children.items()}


def _loose(item: object) -> object:
    if not isinstance(item, tuple):
        return item
    return (item[0], len(item[1]) if isinstance(item[1], tuple) else item[1])


class Run:
    """The pieces of one side, all placed beside the records of the first.

    Args:
        pieces: by rank and micro batch.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        self.first = self.pieces[0].side
        self.tree = LooseTree(self.first)
        self.various: set[Kind] = set()  # kinds of calls that some ranks make more often in the update
        self.rows: list[dict[int, int] | None] = [None]  # row of the first piece -> row of this one; None: the same
        for piece in self.pieces[1:]:
            self.rows.append(None if _alike(self.first, piece.side) else self._beside(piece.side))
        self.micro = 1 + max(piece.micro for piece in self.pieces)
        self._stats = [piece.side.stats for piece in self.pieces]

    def _beside(self, side: Side) -> dict[int, int]:
        tree = LooseTree(side)
        mine, theirs = _updates(self.tree), _updates(tree)
        other = {kind for kind in mine if mine[kind] != theirs[kind]}  # a rank leaves the norms of replicas to another
        self.various |= other
        pairs = owners.rematched(Matcher(self.tree, tree).run(), self.tree, tree).pairs
        rows, _ = measure.paired_rows(self.first, side, pairs)
        return dict(rows)

    def members(self, row: int, last_micro: bool) -> tuple[Floats, list[int]]:
        """float64 (pieces, 4), and their places among `pieces`. `last_micro`: of each rank only the last micro batch that has the row."""
        found: dict[object, tuple[int, int]] = {}
        for at, rows in enumerate(self.rows):
            there = row if rows is None else rows.get(row, -1)
            if there >= 0 and self.pieces[at].side.shape[there] == self.first.shape[row]:
                found[self.pieces[at].rank if last_micro else at] = (at, there)
        return np.array([self._stats[at][there] for at, there in found.values()]), [at for at, _ in found.values()]

    def everywhere(self, row: int) -> list[tuple[list[int], Floats]]:
        """(shape, float64 (4,)) of each piece that has the row as a tensor."""
        found = []
        for at, rows in enumerate(self.rows):
            there = row if rows is None else rows.get(row, -1)
            shape = self.pieces[at].side.shape[there] if there >= 0 else None
            if isinstance(shape, list):
                found.append((shape, self._stats[at][there]))
        return found

    def values(self, row: int) -> list[Any]:
        """The values that an argument has in all pieces."""
        found = []
        for at, rows in enumerate(self.rows):
            there = row if rows is None else rows.get(row, -1)
            if there in self.pieces[at].side.values:
                found.append(self.pieces[at].side.values[there])
        return found

    def count(self, row: int, which: Callable[[Side], Mapping[int, int]]) -> int:
        """Sum of the counts (of NaN, of Inf) of all pieces."""
        total = 0
        for at, rows in enumerate(self.rows):
            there = row if rows is None else rows.get(row, -1)
            total += which(self.pieces[at].side).get(there, 0)
        return total


def _updates(tree: Tree) -> Counter[Kind]:
    """How many calls of each kind follow the backward pass."""
    return Counter(tree.kinds[last_backward(tree) + 1 :])


def _shares_out(tree: Tree) -> bool:
    """The update is shared out over ranks (distributed optimizer): flat pieces, without regard to where a parameter ends."""
    return any(kind[1:2] == ("Distributed",) and "reduce_scatter" in kind[2] for kind in tree.kinds[last_backward(tree) + 1 :])


def _alike(first: Side, second: Side) -> bool:
    return first.ops == second.ops and first.name == second.name


@dataclass
class Whole:
    """Attributes:
    target, golden: sides of the whole; records are those of the first piece of each.
    structure: which record belongs to which.
    producers: as `Tree.producers`, of the first piece of the target.
    made_of: row of the target -> number of pieces, of merged ones.
    skipped: row of the target -> why it was not compared.
    source: row of the target with a part -> the latest record that gave it out.
    rank: row of the target whose replicas disagree -> rank of the one that is off.
    factor: of all gradients of the pieces; 1.0 when there is none.
    """

    target: Side
    golden: Side
    structure: Structure
    producers: Producers
    made_of: dict[int, int] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    source: dict[int, int] = field(default_factory=dict)
    rank: dict[int, int] = field(default_factory=dict)
    factor: float = 1.0

    def turned(self, partners: Mapping[int, int], producers: Producers) -> Whole:
        """The same with the sides changed over. `partners`: row of the target -> row of the golden side."""
        structure = Structure(
            sorted((b, a) for a, b in self.structure.pairs),
            self.structure.only_golden,
            self.structure.only_target,
            {b: a for a, b in self.structure.renamed.items()},
        )
        made_of = {partners[row]: n for row, n in self.made_of.items()}
        skipped = {partners[row]: why for row, why in self.skipped.items()}
        return Whole(self.golden, self.target, structure, producers, made_of, skipped, factor=1 / self.factor)

    def reasons(self) -> Counter[str]:
        """How many rows were not compared, by reason."""
        return Counter(self.skipped.values())


@dataclass
class _Call:
    """What is known of a record while its rows are put together: outputs come last.

    Attributes:
        cut: something that is cut, or a part, goes in.
        local: an argument says where this rank is.
        update: a number of the update goes in that cannot be compared.
        tensors, lost, parts: how many tensors go in, how many of them say something of one rank only, and how many say that or are parts.
        buffer: the first of them is a flat buffer of what lies on this rank.
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


class Joiner:
    """Makes a `Whole` of the pieces of both sides."""

    def __init__(self, target: Sequence[Piece], golden: Sequence[Piece]) -> None:
        self._a, self._b = Run(target), Run(golden)
        first, second = self._a.first, self._b.first
        self._experts = experts.experts_of(first)
        self._around = experts.around(self._a.tree) if self._experts else set()
        self._several = max(self._a.micro, self._b.micro) > 1
        self._running: set[bytes] = set()
        self._owned = owners.owners(self._a.tree)
        matched = owners.rematched(Matcher(self._a.tree, self._b.tree).run(), self._a.tree, self._b.tree)
        self._structure = _without_collectives(matched, self._a.tree, self._b.tree, self._owned)
        self._producers = Tree(first).producers
        self._rows, self._starts = measure.paired_rows(first, second, self._structure.pairs)
        shares = _shares_out(self._a.tree) or _shares_out(self._b.tree)
        self._shared_out = last_backward(self._a.tree) if shares else len(first.ops)
        self._various = self._a.various | self._b.various | self._unequally_owned()
        self._here, self._there = placements.Placements(self._a.tree), placements.Placements(self._b.tree)
        self._partners = dict(self._rows)
        self._twins = twins(self._a.tree)
        self._first_backward = next((op for op, kind in enumerate(self._a.tree.kinds) if kind[0] == "backward"), len(first.ops))
        self._last_backward = last_backward(self._a.tree)

    def _unequally_owned(self) -> set[Kind]:
        """Kinds of calls of the update of which one side shows the parameter more often: what is left over cannot be paired."""
        found = []
        for tree, owned in ((self._a.tree, self._owned), (self._b.tree, owners.owners(self._b.tree))):
            last = last_backward(tree)
            found.append(Counter(tree.kinds[op] for op in owned if op > last))
        return {kind for kind in found[0].keys() | found[1].keys() if found[0][kind] != found[1][kind]}

    def join(self, factors: bool = True) -> Whole:
        """Build both wholes. `factors`: look for a common factor of the gradients and take it out."""
        self._whole = Whole(_copy(self._a.first), _copy(self._b.first), self._structure, self._producers)
        self._parts: dict[bytes, int] = {}
        self._times: dict[int, int] = {}
        self._partial: set[_Mark] = set()
        self._numbers: set[_Mark] = set()
        self._lost: set[_Mark] = set()
        self._written: dict[tuple[str, int], int | None] = {}
        self._extra = set(self._structure.only_target)
        self._next = 0
        self._whole.factor = self._factor() if factors else 1.0
        self._note_running()
        for at, (op, _) in enumerate(self._structure.pairs):
            self._record(op, self._rows[self._starts[at] : self._starts[at + 1]])
        return self._whole

    def join_turned(self, factors: bool = True) -> Whole:
        """As `join`, with the second run as the target."""
        return self.join(factors).turned(self._partners, Tree(self._b.first).producers)

    def _record(self, op: int, rows: Sequence[tuple[int, int]]) -> None:
        side = self._a.first
        inside = self._first_backward < op <= self._last_backward  # a function's own backward calls others
        if op > self._last_backward and op not in self._owned and self._a.tree.kinds[op] in self._various:
            for i, j in rows:
                self._skip(i, j, UPDATE)
            return
        call = _Call(op, inside or self._a.tree.kinds[op][0] in ("backward", "parameters_grad"))
        self._written_before(op)
        for i, j in rows:
            if i in side.values and j in self._b.first.values:
                call.local |= self._argument(i, j)
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

    def _argument(self, i: int, j: int) -> bool:
        """Does an argument say where this rank is, or how large its piece is? Then it is no difference."""
        ours, theirs = self._a.values(i), self._b.values(j)
        most = max(len(self._a.pieces), len(self._b.pieces))
        if self._last_backward < self._a.first.op[i] and all(isinstance(one, float) for one in (*ours, *theirs)):
            pass  # one number of what this rank holds, as its part of a norm
        elif all(one == ours[0] for one in ours) and all(one == theirs[0] for one in theirs):
            shares = self._whole.factor != 1.0 and self._a.first.op[i] > self._first_backward
            if ours[0] == theirs[0] or not (
                _sizes(ours[0], theirs[0], most) or (shares and _inverse(ours[0], theirs[0], self._whole.factor))
            ):
                return False
        elif not all(isinstance(one, (int, list)) for one in (*ours, *theirs)):
            return False
        whole, golden = self._whole.target, self._whole.golden
        whole.values[i], whole.shape[i], whole.md5[i] = golden.values[j], golden.shape[j], golden.md5[j]
        whole.numbers[4 * i : 4 * i + 4] = golden.numbers[4 * j : 4 * j + 4]
        whole.odd.pop(i, None)
        if j in golden.odd:
            whole.odd[i] = golden.odd[j]
        return True

    def _written_before(self, op: int) -> None:
        """Calls up to this record that write into a part, or into what says something of one rank: it stays one, with other numbers."""
        side = self._a.first
        if op > self._first_backward:
            self._written.clear()
        while self._next < op:
            call, self._next = self._next, self._next + 1
            if not IN_PLACE.fullmatch(side.ops[call].split(".")[1]) or self._a.tree.kinds[call][0] != "forward":
                continue
            row = next((row for row in side.rows(call) if side.role[row] == INPUT and isinstance(side.shape[row], list)), -1)
            if row < 0:
                continue
            pieces = self._a.members(row, False)[0]
            if pieces.tobytes() in self._parts or self._mark(row, pieces) in self._lost or self._takes_running(call):
                self._written[self._kind(row)] = self._parts.get(pieces.tobytes())

    def _row(self, call: _Call, i: int, j: int) -> bool:
        """Merge one pair of rows. Returns True when the row is a piece, or a part."""
        first, second, op = self._a.first, self._b.first, call.op
        if _random_state(first.dtype[i], first.shape[i]):
            self._skip(i, j, RANDOM)
            return False
        if SHARE in first.facts.get(i, ()) or SHARE in second.facts.get(j, ()):
            self._skip(i, j, PART)
            return True
        if self._experts:
            if experts.LISTED in first.facts.get(i, ()) or experts.LISTED in second.facts.get(j, ()):
                self._skip(i, j, TOKENS)
                return False
            found = experts.tokens(self._a.everywhere(i), self._b.everywhere(j))
            if found is not None:
                return self._tokens(call, i, j, found)
            if op in self._around and self._other_groups(i, j):
                self._skip(i, j, TOKENS)
                return False
        if merge.whole_shape(first.shape[i], second.shape[j]) is None:
            if len(first.shape[i]) == len(second.shape[j]) == 1 and self._producers.get(i) is None and (call.buffer or not call.tensors):
                call.buffer = True
                self._skip(i, j, UNCLEAR)  # a flat buffer of what lies on this rank
                return False
            pads = merge.padded(first.shape[i], second.shape[j], len(self._a.pieces))
            update = call.update or (self._last_backward < op and _long(first.shape[i]))
            if pads or call.cut or update or (op > self._last_backward and op not in self._owned):
                self._skip(i, j, PADDED if pads else UPDATE if update else UNCLEAR)
            return pads
        if _NOTHING in (first.odd.get(i), second.odd.get(j)):
            self._skip(i, j, EMPTY)
            return False
        if self._is_running(call, i):
            self._skip(i, j, PART)
            return True
        adds = call.backward and self._several and first.ops[op].split(".")[1] in ADDING
        if adds and first.role[i] == INPUT:
            self._skip(i, j, PART)  # the sum so far, and the share of one micro batch
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
        single = measure.elements(first.shape[i]) == measure.elements(second.shape[j]) == 1
        if single and op < self._first_backward and merge.reduced(others, 1) is None:
            made = merge.Cut(first.shape[i], 1, 1, merge.mean_of(pieces), merge.mean_of(others))  # a loss over pieces of the batch
        else:
            made = merge.together(pieces, first.shape[i], others, second.shape[j], self._times_known(i, j, pieces))
        if made is None or made.golden is None:
            if self._is_local(call, i):
                self._lose(i, j, pieces, others)
            else:
                self._without_golden(call, i, j, pieces, made)
            return made is None or made.need > 1 or made.value is None
        shape, need, golden, value = made.shape, made.need, made.golden, made.value
        if value is not None:
            self._times[i] = made.times
        if value is not None and call.backward and single and len(pieces) > 1 and merge.distance(value, golden) > AGREES:
            total = merge.sum_of(pieces, golden, AGREES)
            value = value if total is None else total  # the loss is the sum of those of the pieces
        if value is None:
            value, place = merge.odd_one(pieces, need, golden, self._whole.factor if call.backward else 1.0, AGREES)
            if value is not None:
                self._whole.rank[i] = self._a.pieces[places[place]].rank
            elif single and (total := merge.number_of(pieces, golden, NEAR)) is not None:
                value = total
            elif op > self._last_backward and (single or (call.update and self._part_taken(op) < 0)):
                self._numbers.add(self._mark(i, pieces))
                self._skip(i, j, UPDATE)
                return True
            elif single and op < self._first_backward and first.role[i] == OUTPUT and call.cut:
                value = merge.mean_of(pieces)  # a loss over pieces of the batch
            elif self._is_local(call, i):
                self._lose(i, j, pieces, others)
                return False
            elif op > self._shared_out:
                self._skip(i, j, UPDATE)
                return True
            elif not made.sure or self._is_part(call, i, pieces) or self._masked_gradient(i):
                self._part(call, i, j, pieces)
                return True
            else:
                value = merge.farthest(pieces, need, golden)
        update = single or call.update or (_long(first.shape[i]) and op not in self._owned)
        if self._last_backward < op and update and merge.distance(value, golden) > (NEAR if single else AGREES):
            self._numbers.add(self._mark(i, pieces))
            self._skip(i, j, UPDATE)
            return True
        if self._is_local(call, i) and merge.distance(value, golden) > AGREES:
            self._lose(i, j, pieces, others)
            return False
        if accumulated and merge.distance(value, golden) > AGREES and self._is_share(i, j, shape, golden):
            self._skip(i, j, PART)
            return True
        if op > self._shared_out and merge.distance(value, golden) > AGREES:
            self._skip(i, j, UPDATE)
            return True
        loss = op < self._first_backward and measure.elements(first.shape[i]) == 1  # divided by the number of micro batches
        factor = self._whole.factor if call.backward or loss else 1.0
        if factor != 1.0 and merge.distance(value / factor, golden) < merge.distance(value, golden):
            value = value / factor
        if made.times > 1 and need == len(pieces) and first.role[i] == OUTPUT:
            self._parts.setdefault(pieces.tobytes(), op)  # pieces or parts: what takes it in will tell
        value = np.where(np.abs(value - golden) <= ROUNDING * np.abs(golden), golden, value)
        self._put(self._whole.target, i, value, shape, need, self._a)
        self._put(self._whole.golden, j, golden, shape, made.other, self._b)
        if need > 1:
            self._whole.made_of[i] = need
        return need > 1

    def _tokens(self, call: _Call, i: int, j: int, found: experts.Tokens) -> bool:
        """Merge rows with a row per token. Returns True: they are pieces."""
        numbers = not measure.eps(self._a.first.dtype[i])  # places of tokens, which are other ones on each rank
        if found.target is None or found.golden is None or (numbers and not merge.close(found.target, found.golden)):
            self._skip(i, j, TOKENS)
            return True
        value, golden, factor = found.target, found.golden, self._whole.factor
        if call.backward and merge.distance(value / factor, golden) < merge.distance(value, golden):
            value = value / factor
        value = np.where(np.abs(value - golden) <= ROUNDING * np.abs(golden), golden, value)
        self._put(self._whole.target, i, value, found.shape, 2, self._a)
        self._put(self._whole.golden, j, golden, found.shape, 2, self._b)
        self._whole.made_of[i] = found.pieces
        return True

    def _other_groups(self, i: int, j: int) -> bool:
        """Counts and places of tokens, in the calls that exchange them, when they are not the same: each layout groups them in its own way."""
        first, second = self._a.first, self._b.first
        if merge.whole_shape(first.shape[i], second.shape[j]) is None:
            return True
        if measure.eps(first.dtype[i]):
            return False
        ours, theirs = (np.array([stats for _, stats in run.everywhere(row)]) for run, row in ((self._a, i), (self._b, j)))
        return len(ours) != len(theirs) or not merge.close(merge.merged(ours), merge.merged(theirs))

    def _is_running(self, call: _Call, i: int) -> bool:
        """A single number that is added up over micro batches outside of the backward pass, as a loss for the log, or a buffer that it is
        written into."""
        side, kind = self._a.first, self._a.first.ops[call.op].split(".")[1]
        if not self._several or call.backward or i in side.values:
            return False
        if kind in ADDING:
            return measure.elements(side.shape[i]) == 1
        return kind in ("__getitem__", "__setitem__") and self._takes_running(call.op)

    def _note_running(self) -> None:
        """Find those numbers, and the buffers."""
        side = self._a.first
        for op in range(self._first_backward if self._several else 0):
            kind, rows = side.ops[op].split(".")[1], [row for row in side.rows(op) if isinstance(side.shape[row], list)]
            if kind in ADDING:
                added = [row for row in rows if side.role[row] == OUTPUT and measure.elements(side.shape[row]) == 1]
                self._running.update(self._a.members(row, False)[0].tobytes() for row in added)
                for before in range(max(0, op - 4), op if added else 0):
                    if side.ops[before].split(".")[1] == "__getitem__" and isinstance(side.shape[side.rows(before).start], list):
                        self._running.add(self._a.members(side.rows(before).start, False)[0].tobytes())  # the number was taken from a buffer
            elif kind == "__setitem__" and self._takes_running(op):
                self._running.add(self._a.members(rows[0], False)[0].tobytes())

    def _takes_running(self, op: int) -> bool:
        rows = (row for row in self._a.first.rows(op) if row not in self._a.first.values) if self._running else ()
        return any(self._a.members(row, False)[0].tobytes() in self._running for row in rows)

    def _is_share(self, i: int, j: int, shape: list[int], golden: Floats) -> bool:
        """A parameter's gradient of each micro batch by itself: their means add up to that of the whole, which is all there is to see."""
        if not self._several:
            return False
        means = []
        for run, row in ((self._a, i), (self._b, j)):
            pieces, _ = run.members(row, False)
            last, _ = run.members(row, True)
            need = merge.needed(run.first.shape[row], shape)
            if len(pieces) % need or len(last) % need:
                return False
            means.append([pieces[:, 2].sum() / need, last[:, 2].sum() / need])
        size = golden[3] / max(measure.elements(shape), 1) ** 0.5
        most = max(len(self._a.pieces), len(self._b.pieces))
        factors = {1.0, self._whole.factor, *(float(n) for n in range(2, most + 1))}
        return any(abs(mine / n - other) <= AGREES * size for mine in means[0] for other in means[1] for n in factors)

    def _is_local(self, call: _Call, i: int) -> bool:
        """What a call gives out that was told where this rank is: masks and indices, or something made of the arguments alone."""
        side = self._a.first
        blind = call.lost == call.tensors  # nothing else goes in
        return side.role[i] == OUTPUT and (call.local or call.lost > 0) and (not measure.eps(side.dtype[i]) or blind)

    def _masked_gradient(self, i: int) -> bool:
        """Of a part of which the forward pass has zeroed what belongs to other ranks: the backward pass does it too, in place."""
        twin = self._twins.get(i)
        part = twin is not None and self._whole.skipped.get(twin) == PART
        return part and self._a.first.role[i] == INPUT and self._producers.get(i) is None

    def _hands_on(self, call: _Call) -> bool:
        """What comes out of a part that goes in alone is a part, whatever is done with it, and so is the sum of gradients so far."""
        name = self._a.first.ops[call.op].split(".")[1]
        alone = call.parts == call.tensors and self._a.tree.kinds[call.op][0] == "forward"
        return name in PASSING or alone or call.update or (call.backward and name in ADDING)

    def _kind(self, row: int) -> tuple[str, int]:
        """What a tensor keeps when it is written into."""
        return str(self._a.first.dtype[row]), measure.elements(self._a.first.shape[row])

    def _lose(self, i: int, j: int, pieces: Floats, others: Floats) -> None:
        self._lost.update((self._mark(i, pieces), self._mark(i, others)))
        self._skip(i, j, LOCAL)

    def _is_lost(self, i: int, pieces: Floats, others: Floats) -> bool:
        """Does that come from what only says something of one rank, maybe written into since?"""
        if self._mark(i, pieces) in self._lost or self._mark(i, others) in self._lost:
            return True
        if self._producers.get(i) is None and self._written.get(self._kind(i), -1) is None:
            self._lost.add(self._mark(i, pieces))
            del self._written[self._kind(i)]
            return True
        return False

    def _mark(self, i: int, pieces: Floats) -> _Mark:
        """Tells one tensor from others; `i` is its row in the target."""
        return self._kind(i), pieces.tobytes()

    def _filled_up(self, i: int, j: int) -> bool:
        """A table with more rows than the other side's holds at least what that one holds; True when it could be said."""
        first, second = self._a.first, self._b.first
        whole = merge.filled_up(self._a.members(i, False)[0], first.shape[i], self._b.members(j, False)[0], second.shape[j])
        if whole is None or whole.value is None or whole.golden is None:
            return False
        self._put(self._whole.target, i, whole.value, whole.shape, whole.need, self._a, True)
        self._put(self._whole.golden, j, whole.golden, whole.shape, whole.other, self._b, True)
        self._whole.made_of[i] = whole.need
        return True

    def _without_golden(self, call: _Call, i: int, j: int, pieces: Floats, made: merge.Cut | None) -> None:
        """The golden side has parts of a sum here, or what cannot be put together; where the target has parts too, it is told by them."""
        if made is None or made.value is None:
            self._part(call, i, j, pieces)
        else:
            self._skip(i, j, PART)

    def _times_known(self, i: int, j: int, pieces: Floats) -> int | None:
        """How often a row is cut more than the shapes say: as the dumps have recorded it, else as what it is a gradient of."""
        if self._mark(i, pieces) in self._partial:
            return 1
        least = merge.whole_shape(self._a.first.shape[i], self._b.first.shape[j])
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

    def _is_part(self, call: _Call, i: int, pieces: Floats) -> bool:
        side, op = self._a.first, call.op
        if pieces.tobytes() in self._parts or side.role[i] == PARAMETERS_GRAD:
            return True
        if side.role[i] in (INPUT, PARAMETERS):
            if measure.eps(side.dtype[i]) == 0 and side.role[i] == INPUT and self._has_cut_table(op, i):
                return True  # tokens of other ranks are masked
            producer = self._producers.get(i)
            if producer is None and self._written.get(self._kind(i)) is not None:
                return True
            return producer in self._extra  # made by what only this layout does
        if self._part_taken(op) >= 0:
            return self._hands_on(call)
        return call.cut and not self._a.tree.children.get(op)

    def _has_cut_table(self, op: int, i: int) -> bool:
        """Something else that goes into a record is of another size on the other side."""
        first, second = self._a.first, self._b.first
        rows = (row for row in first.rows(op) if row != i and first.role[row] in (INPUT, PARAMETERS) and isinstance(first.shape[row], list))
        return any(row in self._partners and first.shape[row] != second.shape[self._partners[row]] for row in rows)

    def _part_taken(self, op: int) -> int:
        """A row with a part that goes into a record; -1."""
        rows = self._a.first.rows(op)
        return next((row for row in rows if self._a.first.role[row] == INPUT and row in self._whole.source), -1)

    def _part(self, call: _Call, i: int, j: int, pieces: Floats) -> None:
        op = call.op
        self._partial.add(self._mark(i, pieces))
        key = pieces.tobytes()
        if self._a.first.role[i] in (OUTPUT, PARAMETERS_GRAD):
            taken = self._part_taken(op)
            if taken >= 0 and self._hands_on(call):
                self._parts.setdefault(key, self._whole.source[taken])
            elif len(self._a.tree.kinds[self._parts.get(key, op)]) != 4 or key not in self._parts:  # the innermost module around it
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
            side.odd[row] = (None, None, None, None)
            side.md5[row] = None
            side.shape[row] = None
            for known in (side.nans, side.infs, side.facts):
                known.pop(row, None)

    @staticmethod
    def _put(side: Side, row: int, value: Floats, shape: list[int], need: int, run: Run, anyway: bool = False) -> None:
        if need == 1 and len(run.pieces) == 1 and not anyway:
            return
        side.numbers[4 * row : 4 * row + 4] = array("d", value.tolist())
        if side.shape[row] != shape:
            side.shape[row] = shape
            side.odd.pop(row, None)
            side.md5[row] = None
            side.facts[row] = {key: fact for key, fact in side.facts.get(row, {}).items() if key != "digest"}
        for known, which in ((side.nans, _nans), (side.infs, _infs)):
            count = run.count(row, which)
            if count:
                known[row] = count

    def _factor(self) -> float:
        """Ratio of all gradients of the pieces to those of the whole: each piece takes the mean over its own part of the batch."""
        ratios = []
        first, second = self._a.first, self._b.first
        for i, j in self._rows:
            if first.role[i] != INPUT or self._a.tree.kinds[first.op[i]][0] != "backward" or not first.shape[i] or not second.shape[j]:
                continue
            made = merge.together(self._a.members(i, False)[0], first.shape[i], self._b.members(j, False)[0], second.shape[j])
            if made is None or made.value is None or made.golden is None or made.shape == first.shape[i] == second.shape[j]:
                continue
            if made.value[3] > 0 and made.golden[3] > 0:
                ratios.append(made.value[3] / made.golden[3])
        if not ratios:
            return 1.0
        # a vote, not the middle: behind a defect in the backward pass all gradients have another ratio
        most = max(len(self._a.pieces), len(self._b.pieces))
        found = np.asarray(ratios)
        votes = {f: int((np.abs(found / f - 1) < AGREES).sum()) for n in range(1, most + 1) for f in (float(n), 1.0 / n)}
        best = max(votes, key=lambda f: (votes[f], f == 1.0))
        return best if votes[best] >= max(1, len(ratios) // 5) else 1.0


def twins(tree: Tree) -> dict[int, int]:
    """Row of a gradient -> row of what it is the gradient of: of backward calls those of the forward call, of parameter gradients the
    parameter."""
    side = tree.side
    parameters: dict[tuple[str, str], int] = {}
    for row, role in enumerate(side.role):
        if role == PARAMETERS:
            parameters.setdefault((tree.kinds[side.op[row]][2], side.name[row].rpartition(".")[2]), row)
    found: dict[int, int] = {}
    for op, kind in enumerate(tree.kinds):
        if kind[0] == "backward":
            twin = tree.index.get(facts.forward_twin(side.ops[op]))
            if twin is None:
                continue
            left = {
                role: [r for r in side.rows(twin) if side.role[r] == role and side.requires_grad[r] is not False]
                for role in (INPUT, OUTPUT)
            }
            for row in side.rows(op):
                others = left[OUTPUT if side.role[row] == INPUT else INPUT]
                same = next((other for other in others if side.shape[other] == side.shape[row]), None)
                if same is not None:
                    others.remove(same)
                    found[row] = same
        elif tree.is_gradients(op) and len(kind) > 2:
            for row in side.rows(op):
                at = parameters.get((kind[2], side.name[row].rpartition(".")[2]))
                if at is not None:
                    found[row] = at
    return found


def _long(shape: list[int]) -> bool:
    """All elements lie along one dimension, as one number of each parameter that a rank holds."""
    return max(shape, default=1) == measure.elements(shape)


def _without_collectives(structure: Structure, target: Tree, golden: Tree, owned: Mapping[int, owners.Owner]) -> Structure:
    """Collectives of one layout have no counterpart in another one, even where there are some. Of the calls of an update the kinds that
    the runs do not make equally often may be about other parameters."""
    last, other = last_backward(target), last_backward(golden)
    mine = Counter((kind, owned.get(op)) for op, kind in enumerate(target.kinds) if op > last)
    others = owners.owners(golden)
    theirs = Counter((kind, others.get(op)) for op, kind in enumerate(golden.kinds) if op > other)
    gone = {}
    for op, partner in structure.pairs:
        key = (target.kinds[op], owned.get(op))
        if target.side.ops[op].startswith("Distributed.") or (op > last and len(key[0]) != 4 and mine[key] != theirs[key]):
            gone[op] = partner
    structure.pairs = [pair for pair in structure.pairs if pair[0] not in gone]
    structure.only_target = sorted((*structure.only_target, *gone))
    structure.only_golden = sorted((*structure.only_golden, *gone.values()))
    return structure


def _sizes(first: Any, second: Any, most: int) -> bool:
    """Two whole numbers, or lists of some, that are equal or up to `most` times each other."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(a == b or _sizes(a, b, most) for a, b in zip(first, second))
    if type(first) is not int or type(second) is not int or first <= 0 or second <= 0:
        return False
    large, small = max(first, second), min(first, second)
    return large % small == 0 and large // small <= most


def _inverse(first: Any, second: Any, factor: float) -> bool:
    """Two numbers that take a factor of the gradients out."""
    both = isinstance(first, float) and isinstance(second, float) and second != 0.0
    return both and min(abs(first / second * factor - 1), abs(first / second / factor - 1)) < AGREES


def _random_state(dtype: str | None, shape: list[int]) -> bool:
    """The state of torch's generator on the CPU, or on a device."""
    return str(dtype).endswith("uint8") and shape in ([5056], [16])


def _nans(side: Side) -> Mapping[int, int]:
    return side.nans


def _infs(side: Side) -> Mapping[int, int]:
    return side.infs


def _copy(side: Side) -> Side:
    """A side whose rows can be replaced."""
    copied = dataclasses.replace(
        side,
        shape=list(side.shape),
        numbers=array("d", side.numbers),
        md5=list(side.md5),
        odd=dict(side.odd),
        values=dict(side.values),
        nans=dict(side.nans),
        infs=dict(side.infs),
        facts=dict(side.facts),
    )
    copied.__dict__["stacks"], copied.__dict__["construct"] = side.stacks, side.construct
    return copied
