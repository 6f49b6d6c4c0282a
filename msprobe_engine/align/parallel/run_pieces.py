"""One side of a comparison across layouts: its pieces, placed beside the records of the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from msprobe_engine.align.calls.call_tree import Kind, Tree
from msprobe_engine.align.calls.structure import Matcher
from msprobe_engine.align.parallel import parameter_owner
from msprobe_engine.align.parallel.merge_statistics import Floats
from msprobe_engine.align.parallel.micro_batches import Piece, last_backward, subset
from msprobe_engine.formats.dump.dump_table import PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import distances
from msprobe_engine.measure.comparable_dtypes import plain


class LooseTree(Tree):
    """Dimensions differ between layouts; their number and the dtype do not."""

    def form(self, dtype: str | None, shape: Any) -> Hashable:
        """dtype and number of dimensions."""
        return plain(dtype), len(shape) if isinstance(shape, (list, tuple)) else shape

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """In the order in which they began: when autograd says that a module's backward pass is over differs between layouts."""
        begins = list(range(len(self.parents)))
        for op, parent in enumerate(self.parents):
            while parent >= 0 and begins[parent] > begins[op]:
                begins[parent] = begins[op]
                parent = self.parents[parent]
        return {parent: sorted(inside, key=begins.__getitem__) for parent, inside in super().children.items()}


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
            self.rows.append(None if self.first.ops == piece.side.ops and self.first.name == piece.side.name else self._beside(piece))
        self.micro = 1 + max(piece.micro for piece in self.pieces)
        self._stats = [piece.side.stats for piece in self.pieces]

    def _beside(self, piece: Piece) -> dict[int, int]:
        side = piece.side
        tree = LooseTree(side)
        if piece.micro and (tail := last_backward(self.tree) + 1) < len(self.first.ops):
            # a later micro batch has no update, and the next step's batch, which may be fetched after the update, is not its own
            calls = LooseTree(subset(self.first, range(tail)))
            return dict(distances.paired_rows(calls.side, side, Matcher(calls, tree).run(one_batch=False).pairs)[0])
        mine, theirs = updates(self.tree), updates(tree)
        other = {kind for kind in mine if mine[kind] != theirs[kind]}  # a rank leaves the norms of replicas to another
        self.various |= other
        pairs = parameter_owner.rematch_by_owner(Matcher(self.tree, tree).run(one_batch=False), self.tree, tree).pairs
        rows, _ = distances.paired_rows(self.first, side, pairs)
        return dict(rows)

    def members(self, row: int, last_micro: bool) -> tuple[Floats, list[int]]:
        """float64 (pieces, 4), and their places among `pieces`. `last_micro`: of each rank only the last micro batch that has the row."""
        found: dict[object, tuple[int, int]] = {}
        for at, rows in enumerate(self.rows):
            there = row if rows is None else rows.get(row, -1)
            if there >= 0 and self.pieces[at].side.shape[there] == self.first.shape[row]:
                found[self.pieces[at].rank if last_micro else at] = (at, there)
        return np.array([self._stats[at][there] for at, there in found.values()]), [at for at, _ in found.values()]

    def before(self, row: int) -> list[int]:
        """Rows of earlier records with the gradient of the same parameter."""
        mine = self._gradients.get(self._parameter(row), [])
        return mine[: mine.index(row)] if row in mine else []

    @cached_property
    def _gradients(self) -> dict[tuple[Kind, str], list[int]]:
        found: dict[tuple[Kind, str], list[int]] = {}
        for row in range(len(self.first)):
            if self.first.role[row] == PARAMETERS_GRAD:
                found.setdefault(self._parameter(row), []).append(row)
        return found

    def _parameter(self, row: int) -> tuple[Kind, str]:
        op = self.first.op[row]
        return self.tree.kinds[op], self.first.name[row][len(self.first.ops[op]) :]

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
        found = []
        for at, rows in enumerate(self.rows):
            there = row if rows is None else rows.get(row, -1)
            if there in self.pieces[at].side.values:
                found.append(self.pieces[at].side.values[there])
        return found

    def count(self, row: int, which: Callable[[DumpTable], Mapping[int, int]]) -> int:
        """Sum of the counts (of NaN, of Inf) of all pieces."""
        total = 0
        for at, rows in enumerate(self.rows):
            there = row if rows is None else rows.get(row, -1)
            total += which(self.pieces[at].side).get(there, 0)
        return total


def updates(tree: Tree) -> Counter[Kind]:
    """How many calls of each kind follow the backward pass."""
    return Counter(tree.kinds[last_backward(tree) + 1 :])
