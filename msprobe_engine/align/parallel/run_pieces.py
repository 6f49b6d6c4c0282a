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
        end = last_backward(self.tree) + 1
        if piece.micro and end < len(self.first.ops):
            # a later micro batch has no update, and the next step's batch, which may be fetched after the update, is not its own
            for kind in tree.kinds[last_backward(tree) + 1 :]:
                if end == len(self.first.ops) or self.tree.kinds[end] != kind or not self._is_made_of_pass(end):
                    break
                end += 1
            calls = LooseTree(subset(self.first, range(end)))
            return dict(distances.paired_rows(calls.side, side, Matcher(calls, tree).run(one_batch=False).pairs)[0])
        own_updates, piece_updates = updates(self.tree), updates(tree)
        unequal = {
            kind for kind in own_updates if own_updates[kind] != piece_updates[kind]
        }  # a rank leaves the norms of replicas to another
        self.various |= unequal
        pairs = parameter_owner.rematch_by_owner(Matcher(self.tree, tree).run(one_batch=False), self.tree, tree).pairs
        rows, _ = distances.paired_rows(self.first, side, pairs)
        return dict(rows)

    def _is_made_of_pass(self, op: int) -> bool:
        """A call behind the backward pass of the first micro batch takes in what its forward pass gave (a loss for the log), or what
        another such call has made of it."""
        sources = (self.tree.producers.get(row) for row in self.tree.tensors_in(op))
        return any(source is not None and self.tree.kinds[source][0] == "forward" for source in sources)

    def members(self, row: int, last_micro: bool) -> tuple[Floats, list[int]]:
        """float64 (pieces, 4), and their places among `pieces`. `last_micro`: of each rank only the last micro batch that has the row."""
        chosen: dict[object, tuple[int, int]] = {}
        for place, rows in enumerate(self.rows):
            piece_row = row if rows is None else rows.get(row, -1)
            if piece_row >= 0 and self.pieces[place].side.shape[piece_row] == self.first.shape[row]:
                chosen[self.pieces[place].rank if last_micro else place] = (place, piece_row)
        return np.array([self._stats[place][piece_row] for place, piece_row in chosen.values()]), [place for place, _ in chosen.values()]

    def before(self, row: int) -> list[int]:
        """Rows of earlier records with the gradient of the same parameter."""
        same_parameter = self._gradients.get(self._parameter(row), [])
        return same_parameter[: same_parameter.index(row)] if row in same_parameter else []

    @cached_property
    def _gradients(self) -> dict[tuple[Kind, str], list[int]]:
        gradients: dict[tuple[Kind, str], list[int]] = {}
        for row in range(len(self.first)):
            if self.first.role[row] == PARAMETERS_GRAD:
                gradients.setdefault(self._parameter(row), []).append(row)
        return gradients

    def _parameter(self, row: int) -> tuple[Kind, str]:
        op = self.first.op[row]
        return self.tree.kinds[op], self.first.name[row][len(self.first.ops[op]) :]

    def everywhere(self, row: int) -> list[tuple[list[int], Floats]]:
        """(shape, float64 (4,)) of each piece that has the row as a tensor."""
        tensors = []
        for place, rows in enumerate(self.rows):
            piece_row = row if rows is None else rows.get(row, -1)
            shape = self.pieces[place].side.shape[piece_row] if piece_row >= 0 else None
            if isinstance(shape, list):
                tensors.append((shape, self._stats[place][piece_row]))
        return tensors

    def values(self, row: int) -> list[Any]:
        values = []
        for place, rows in enumerate(self.rows):
            piece_row = row if rows is None else rows.get(row, -1)
            if piece_row in self.pieces[place].side.values:
                values.append(self.pieces[place].side.values[piece_row])
        return values

    def count(self, row: int, which: Callable[[DumpTable], Mapping[int, int]]) -> int:
        """Sum of the counts (of NaN, of Inf) of all pieces."""
        total = 0
        for place, rows in enumerate(self.rows):
            piece_row = row if rows is None else rows.get(row, -1)
            total += which(self.pieces[place].side).get(piece_row, 0)
        return total


def updates(tree: Tree) -> Counter[Kind]:
    """How many calls of each kind follow the backward pass."""
    return Counter(tree.kinds[last_backward(tree) + 1 :])
