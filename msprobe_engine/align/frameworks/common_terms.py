"""A side in the terms that it shares with one of another framework."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.calls.call_tree import Producers, Tree
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, DumpTable

Floats = npt.NDArray[np.float64]


@dataclass
class CommonSide(DumpTable):
    """One record per call or group of calls. Names are those of the file; the places of its rows (`DumpTable.positions`) are the same ones
    on both sides.

    Attributes:
        told: row -> why it has no partner and needs none.
        quiet: records that need no partner: they compute nothing, or the other side has them as part of others.
        rows_before: of each row the rows of the file that it was made of.
        members: of each record the records of the file that it stands for.
    """

    told: dict[int, str] = field(default_factory=dict)
    quiet: set[int] = field(default_factory=set)
    rows_before: list[tuple[int, ...]] = field(default_factory=list)
    members: list[tuple[int, ...]] = field(default_factory=list)


def several(side: DumpTable, op: int) -> bool:
    """A record stands for several of its file."""
    return isinstance(side, CommonSide) and len(side.members[op]) > 1


class CommonTree(Tree):
    """A quiet call has made no numbers: where what it gives out is taken in, the call counts that it has it from."""

    def __init__(self, side: CommonSide) -> None:
        super().__init__(side)
        self._common = side

    @cached_property
    def producers(self) -> Producers:
        """As of any tree, looked through quiet calls, and through views that nobody has recorded."""
        side, quiet = self._common, self._common.quiet
        plain = super().producers
        source: dict[int, int] = {}  # quiet record -> where its first tensor comes from
        for op in sorted(quiet):
            taken = (plain.get(row) for row in side.rows(op) if side.role[row] == INPUT and isinstance(side.shape[row], list))
            producer = next((record for record in taken if record is not None), None)
            if producer is not None:
                source[op] = source.get(producer, producer)
        records = array("q", [-1]) * len(side)
        given: dict[Hashable, int] = {}
        for op in range(len(side.ops)):
            for row in side.rows(op):
                if side.role[row] == INPUT and isinstance(side.shape[row], list) and row not in side.values:
                    before = plain.get(row)
                    before = given.get(self._mark(row)) if before is None else source.get(before, before)
                    records[row] = -1 if before is None else before
            for row in side.rows(op):
                if side.role[row] == OUTPUT and isinstance(side.shape[row], list) and op not in quiet:
                    given.setdefault(self._mark(row), op)
        return Producers(records)

    def _mark(self, row: int) -> Hashable:
        """Size and numbers of a tensor, whatever its shape: a view of it may not have been recorded."""
        high, low, _, norm = self.side.stats_of(row)
        known = [f"{value:.5e}" if isinstance(value, (int, float)) else str(value) for value in (high, low, norm)]
        return (int(np.prod(self.side.shape[row])), *known)


def in_common(values: Floats, side: DumpTable) -> Floats:
    """float64, one value per row of a file -> one per row of the side: of a row that several make the largest. A side of one framework
    has the rows of its file."""
    if not isinstance(side, CommonSide):
        return values
    return np.array([values[list(rows)].max() for rows in side.rows_before] or [0.0], np.float64)[: len(side)]
