"""Rows of two graphs whose nodes belong together, beside each other, as columns.

The existing tool sets rows side by side by their place among the arguments, the parameters, the results and the gradients of a call, not
by their names: an argument given by name on one side only still stands beside its own. What the target has more of stands beside nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure import factorize
from msprobe_engine.measure.factorize import Bools, Integers
from msprobe_engine.report.graph.nodes.model import Graph

Floats = npt.NDArray[np.float64]
_ROLES = 8
"""More than there are roles of rows."""


@dataclass
class PairedRows:
    """Rows of nodes with a partner, in the order of the target's nodes.

    Attributes:
        nodes: int64 (m,), nodes of the target that have a partner and at least one row.
        starts: int64 (m,), position of the first row of each node.
        target_rows: int64 (n,), rows of the target.
        golden_rows: int64 (n,), the row of the golden side, -1 without one.
    """

    target: DumpTable
    golden: DumpTable
    nodes: Integers
    starts: Integers
    target_rows: Integers
    golden_rows: Integers

    def __len__(self) -> int:
        return len(self.target_rows)

    @cached_property
    def matched(self) -> Bools:
        """bool (n,): the row stands beside one of the golden side."""
        return self.golden_rows >= 0

    @cached_property
    def group(self) -> Integers:
        """int64 (n,): position of the row's node among `nodes`."""
        starts = np.zeros(len(self), np.int64)
        starts[self.starts[1:]] = 1
        return np.cumsum(starts)

    @cached_property
    def outputs(self) -> Bools:
        """bool (n,): the rows that 26.2.0 takes for results: their name holds ``.output.``, and be it in the path of a module."""
        return _mask_names_with(self.target.name, ".output.")[self.target_rows]

    @cached_property
    def results(self) -> Bools:
        """bool (n,): `result_rows`, of the target's rows."""
        return result_rows(self.target)[self.target_rows]

    def largest(self, values: Floats) -> Floats:
        """float64 (m,): the largest of each node's rows."""
        return np.maximum.reduceat(values, self.starts) if len(self.nodes) else np.zeros(0)

    def smallest(self, values: Floats) -> Floats:
        """float64 (m,): the smallest of each node's rows."""
        return np.minimum.reduceat(values, self.starts) if len(self.nodes) else np.zeros(0)


def pair_rows(target: Graph, golden: Graph, partners: Sequence[int]) -> PairedRows:
    """Put the rows of all nodes with a partner beside each other.

    Args:
        target, golden: graphs with sides.
        partners: golden node of each target node, -1 for none.
    """
    assert target.side is not None
    assert golden.side is not None
    target_side, golden_side = target.side, golden.side
    golden_nodes = np.asarray(partners, np.int64)
    target_records = np.asarray(target.records, np.int64)
    golden_records = np.asarray([*golden.records, -1], np.int64)[golden_nodes]  # -1 takes the last one
    begin = factorize.firsts(target_side)
    counts = np.where(target_records >= 0, np.diff(np.append(begin, begin[-1]))[target_records], 0)
    nodes = np.flatnonzero((golden_nodes >= 0) & (counts > 0))
    counts, record, partner = counts[nodes], target_records[nodes], golden_records[nodes]
    target_rows = factorize.spread(begin[record], counts)
    starts = np.cumsum(counts) - counts
    role = np.frombuffer(bytes(target_side.role), np.uint8).astype(np.int64)
    exists = np.repeat(partner, counts) >= 0
    key = np.where(exists, np.repeat(partner, counts) * _ROLES + role[target_rows], 0)
    place, begins, many = (
        _places(target_side)[target_rows],
        _first_rows(golden_side),
        np.bincount(_keys(golden_side), minlength=len(golden_side.ops) * _ROLES + 1),
    )
    golden_rows = np.where(exists & (place < many[key]), begins[key] + place, -1)
    return PairedRows(target_side, golden_side, nodes, starts, target_rows, golden_rows)


def told_rows(target: Graph, rows: PairedRows, golden_row_of: Mapping[int, int]) -> PairedRows:
    """Put the rows of some nodes beside others than their place says; what these nodes have beside that is left out.

    Args:
        rows: by their places.
        golden_row_of: row of the target -> row of the golden side. A node of which a row is told has no others.
    """
    assert target.side is not None
    nodes = {target.node_of_record[target.side.op[row]] for row in golden_row_of}
    right = np.array([golden_row_of.get(row, -1) for row in range(len(rows.target))], np.int64)
    said = np.isin(rows.nodes, np.fromiter(nodes, np.int64, len(nodes)))[rows.group]
    other = np.where(said, right[rows.target_rows], rows.golden_rows)
    kept = ~said | (other >= 0)
    groups = rows.group[kept]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    return PairedRows(rows.target, rows.golden, rows.nodes[groups[starts]], starts, rows.target_rows[kept], other[kept])


def _keys(side: DumpTable) -> Integers:
    """int64 (rows,): record and role in one number."""
    return np.array(side.op, np.int64) * _ROLES + np.frombuffer(bytes(side.role), np.uint8)


def _first_rows(side: DumpTable) -> Integers:
    """int64 (records * roles,): the first row of each role of a record; 0 where there is none."""
    keys = _keys(side)
    found = np.zeros(max(len(side.ops), 1) * _ROLES, np.int64)
    found[keys[::-1]] = np.arange(len(keys))[::-1]
    return found


def _places(side: DumpTable) -> Integers:
    """int64 (rows,): place of each row among those of its role in its record; rows of one role stand together."""
    keys = _keys(side)
    return np.asarray(np.arange(len(keys)) - _first_rows(side)[keys])


def result_rows(side: DumpTable) -> Bools:
    """bool (rows,): rows that the existing tool shows as ``output_data``; what has ``.input.`` in its name, and be it in the path of a
    module, is shown as input."""
    return factorize.once((side.name,), lambda: _mask_names_with(side.name, ".output.") & ~_mask_names_with(side.name, ".input."))


def _mask_names_with(names: Sequence[str], part: str) -> Bools:
    return np.fromiter((part in name for name in names), bool, len(names))


@dataclass
class Numbers:
    """The four statistics of each row of a side as numbers, arguments that are numbers included.

    Attributes:
        values: float64 (rows, 4); NaN where there is none.
        known: bool (rows, 4): it is a number (a NaN too, no truth value).
        some: bool (rows,): Max is not None.
        bad: bool (rows,): Max or Min is a float and NaN or infinite.
        bad_text: bool (rows,): the same, text that says so counts too.
    """

    values: Floats
    known: Bools
    some: Bools
    bad: Bools
    bad_text: Bools


def numbers_of(side: DumpTable) -> Numbers:
    values = np.array(side.stats, np.float64) if len(side) else np.zeros((0, 4))
    known = np.ones(values.shape, bool)
    some = np.ones(len(values), bool)
    bad: Bools = np.asarray(~np.isfinite(values[:, :2]).all(1))
    bad_text = bad.copy()
    for row, four in side.nonfloat_stats.items():
        first, second = four[0], four[1]
        some[row] = first is not None
        bad[row] = _is_bad(first) or (second is not first and _is_bad(second))
        bad_text[row] = bad[row] or _says_bad(first) or (second is not first and _says_bad(second))
        if first is second is four[2] is four[3]:  # an argument: its value stands in place of all four
            known[row] = type(first) is float or type(first) is int
        else:
            known[row] = [type(value) is float or type(value) is int for value in four]
    values[~known] = np.nan
    return Numbers(values, known, some, bad, bad_text)


def _is_bad(value: object) -> bool:
    return type(value) is float and value - value != 0


def _says_bad(value: object) -> bool:
    return type(value) is str and value.strip().lower() in ("nan", "inf", "-inf")
