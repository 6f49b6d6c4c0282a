"""The rows of several ranks beside those of the first: what each rank has of every tensor, in arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.parallel.merge_statistics import SAME
from msprobe_engine.align.parallel.micro_batches import Piece
from msprobe_engine.align.parallel.run_pieces import Run
from msprobe_engine.formats.dump.dump_table import DumpTable

Bools = npt.NDArray[np.bool_]


class RankStack:
    """Ranks that run the same part of the model, as those of a tensor-parallel group.

    Args:
        sides: by rank, at least one. Records of the first rank count; those of the others are matched with them, by name where the
            ranks made the same calls, else by structure.

    Attributes:
        ranks: ascending.
        first: the side of the first rank.
        at: int64 (ranks, rows), the row that each rank has for a row of the first; -1 where it has none.
        stats: float64 (ranks, rows, 4) of Max, Min, Mean, Norm; NaN where a rank has none.
        tensor: bool (rows,), rows that are tensors with a known shape.
    """

    def __init__(self, sides: Mapping[int, DumpTable]) -> None:
        self.ranks = sorted(sides)
        self.sides = [sides[rank] for rank in self.ranks]
        self.first = self.sides[0]
        run = Run([Piece(rank, 0, sides[rank]) for rank in self.ranks])
        self.tree = Tree(self.first)
        rows = len(self.first)
        self.at = np.full((len(self.ranks), rows), -1, np.int64)
        for place, found in enumerate(run.rows):
            if found is None:
                self.at[place] = np.arange(rows)
            elif found:
                pairs = np.array(sorted(found.items()), np.int64)
                self.at[place, pairs[:, 0]] = pairs[:, 1]
        self.stats = np.full((len(self.ranks), rows, 4), np.nan)
        for place, side in enumerate(self.sides):
            has = self.at[place] >= 0
            self.stats[place, has] = side.stats[self.at[place, has]]
        first = self.first
        self.tensor = np.array([isinstance(shape, list) for shape in first.shape], bool)
        self.tensor[np.fromiter(first.values, np.int64, len(first.values))] = False

    def members(self, row: int) -> list[tuple[int, int]]:
        """(place among the ranks, its row) of each rank that has the row."""
        return [(place, int(at)) for place, at in enumerate(self.at[:, row]) if at >= 0]

    def lost_records(self) -> list[list[int]]:
        """Per rank the records that the first rank has no counterpart of."""
        found = []
        for place, side in enumerate(self.sides):
            known = np.zeros(len(side.ops), bool)
            rows = self.at[place][self.at[place] >= 0]
            known[np.array(side.op, np.int64)[rows]] = True
            names = set(self.first.ops)
            found.append([op for op in np.flatnonzero(~known).tolist() if len(side.rows(op)) or side.ops[op] not in names])
        return found

    @cached_property
    def everywhere(self) -> Bools:
        """bool (rows,): all ranks have the row."""
        return np.asarray((self.at >= 0).all(0))

    @cached_property
    def alike(self) -> Bools:
        """bool (rows,): all ranks that have the row say the same, within the last bits that the order of a sum moves.

        Each extreme counts for itself: the large constant of a mask is the same in all pieces, and most of the norm."""
        base = self.stats[0]
        equal = np.ones(base.shape[0], bool)
        with np.errstate(all="ignore"):
            for place in range(1, len(self.ranks)):
                other = self.stats[place]
                limit = SAME * np.maximum(abs(base), abs(other))
                limit[:, 2] = SAME * np.maximum(
                    np.maximum(abs(base[:, 0]), abs(base[:, 1])), np.maximum(abs(other[:, 0]), abs(other[:, 1]))
                )
                same = (base == other) | (abs(base - other) <= limit) | (np.isnan(base) & np.isnan(other))
                equal &= same.all(1) | (self.at[place] < 0)
        return equal

    @cached_property
    def equal(self) -> Bools:
        """bool (rows,): all ranks have the row and say the same to the last bit."""
        base = self.stats[0]
        found = self.everywhere.copy()
        for other in self.stats[1:]:
            found &= ((base == other) | (np.isnan(base) & np.isnan(other))).all(1)
        return np.asarray(found)

    def key(self, row: int) -> bytes:
        """What the tensor of a row is known by on all ranks together: the same numbers, whatever its shape. The last bits of a norm depend
        on the order in memory, so it counts as a float32."""
        stats = self.stats[:, row]
        return stats[:, :2].tobytes() + stats[:, 3].astype(np.float32).tobytes()

    def shapes(self, row: int) -> list[list[int]]:
        """Shape of each rank's piece."""
        return [shape for place, at in self.members(row) if isinstance(shape := self.sides[place].shape[at], list)]

    def tensors(self, op: int, roles: Sequence[int]) -> list[int]:
        """Rows of a record that are tensors."""
        return [row for row in self.first.rows(op) if self.tensor[row] and self.first.role[row] in roles]
