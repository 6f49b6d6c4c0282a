"""How the pieces of two runs are put together, row by row, and why some rows cannot be: the numbers of the dumps stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msprobe_engine.align.parallel.merge_statistics import Floats

PART, PADDED, UNCLEAR, UPDATE = "parts of a sum", "padded", "of other shapes", "single numbers of the update"
EMPTY, LOCAL, RANDOM = "without statistics", "of one rank alone", "states of random numbers"
TOKENS = "tokens in other groups"
"""Why a row cannot be compared."""


class PlanLine(NamedTuple):
    """One row of a plan, for people.

    Attributes:
        target, golden: the names of the row on both sides.
        what: what becomes of it.
        target_pieces, golden_pieces: how many pieces of a side make the whole; 0 where nothing is put together.
        shape: of the whole, as ``4x16``.
    """

    target: str
    golden: str
    what: str
    target_pieces: int = 0
    golden_pieces: int = 0
    shape: str = ""


class MergedRow(NamedTuple):
    """Statistics of the whole of one row, on both sides.

    Attributes:
        target, golden: float64 (4,): Max, Min, Mean, Norm.
        shape: of the whole.
        target_pieces, golden_pieces: how many of a side's pieces make the whole; 1: each piece is all of it.
        always: write the row although its side has one piece.
    """

    target: Floats
    golden: Floats
    shape: list[int]
    target_pieces: int
    golden_pieces: int
    always: bool = False


@dataclass
class MergePlan:
    """Rows are the target's.

    Attributes:
        partners: row -> the golden side's row.
        merged: rows with statistics of the whole.
        arguments: rows with an argument that says where a rank is, or how large its piece is: the golden side's counts.
        made_of: row -> number of pieces, of merged ones.
        skipped: row -> why it is not compared.
        source: row with a part -> the latest record that gave it out.
        unsummed: rows that an update takes in as parts of a sum; `source` has the record that gave them out.
        apart: rows that the update of a parameter takes in, of which each rank has other numbers though each updates all of it.
        by_mean: rows that are sums of shares: of these the mean alone was put together, the rest is the golden side's.
        rank: row whose replicas disagree -> rank of the one that is off.
        factor: of all gradients of the pieces; 1.0 when there is none. `sure`: most gradients say so.
    """

    partners: Mapping[int, int]
    merged: dict[int, MergedRow] = field(default_factory=dict)
    arguments: set[int] = field(default_factory=set)
    made_of: dict[int, int] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    source: dict[int, int] = field(default_factory=dict)
    unsummed: set[int] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)
    by_mean: set[int] = field(default_factory=set)
    rank: dict[int, int] = field(default_factory=dict)
    factor: float = 1.0
    sure: bool = False

    def swap_sides(self, records: Mapping[int, int]) -> MergePlan:
        """The same with the sides changed over. `records`: record of the target -> record of the golden side."""
        partners = self.partners
        return MergePlan(
            {golden_row: row for row, golden_row in partners.items()},
            {
                partners[i]: MergedRow(row.golden, row.target, row.shape, row.golden_pieces, row.target_pieces, row.always)
                for i, row in self.merged.items()
            },
            {partners[row] for row in self.arguments},
            {partners[row]: n for row, n in self.made_of.items()},
            {partners[row]: why for row, why in self.skipped.items()},
            {partners[row]: records[op] for row, op in self.source.items() if op in records},
            {partners[row] for row in self.unsummed},
            by_mean={partners[row] for row in self.by_mean},
            factor=1 / self.factor,
            sure=self.sure,
        )

    def lines(self, target: Sequence[str], golden: Sequence[str]) -> Iterator[PlanLine]:
        """The plan, printable. `target`, `golden`: the names of all rows."""
        for i in sorted({*self.merged, *self.skipped, *self.arguments}):
            names = target[i], golden[self.partners[i]]
            if i in self.skipped:
                yield PlanLine(*names, f"not compared: {self.skipped[i]}")
            elif i in self.arguments:
                yield PlanLine(*names, "argument that follows the layout")
            else:
                row = self.merged[i]
                pieces = row.target_pieces > 1 or row.golden_pieces > 1
                what = "mean of shares" if i in self.by_mean else "put together from pieces" if pieces else "the same on all ranks"
                if i in self.rank:
                    what = f"rank {self.rank[i]} differs from the others"
                yield PlanLine(*names, what, row.target_pieces, row.golden_pieces, "x".join(map(str, row.shape)))

    def reasons(self) -> Counter[str]:
        """How many rows are not compared, by reason."""
        return Counter(self.skipped.values())
