"""A comparison as rows of cells: the sheets of the existing tool with its columns, ours behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msprobe_engine.config.severity import PASS, WARNING
from msprobe_engine.core.text.ranges import format_ranges
from msprobe_engine.find.config import difference
from msprobe_engine.find.config.comparison import Comparison
from msprobe_engine.find.config.difference import ADDED, CHECKERS, COLUMNS, Difference
from msprobe_engine.find.config.environment import ONLY_BENCH_HAS, ONLY_CMP_HAS

HARMLESS_SHEET, DERIVED_SHEET, NOTES_SHEET, SUMMARY_SHEET = "harmless", "derived", "notes", "summary"
_BY_ROWS = (difference.DATASET, difference.WEIGHTS, difference.RANDOM)
"""Sheets that have a row for everything, equal or not."""


class Table(NamedTuple):
    """One sheet.

    Attributes:
        rows: cells in the order of the columns; None: empty.
    """

    name: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


def tables(comparison: Comparison, old: bool = False) -> Iterator[Table]:
    """All sheets in their order.

    Args:
        old: ``pass_check`` as version 8.1.1 has it, True or False.
    """
    yield _summary(comparison, old)
    for name in CHECKERS:
        sheet = comparison.sheets.get(name)
        if sheet is None:
            continue
        if name in _BY_ROWS:
            columns = (*COLUMNS[name], "severity", "why")
            # rank -1: all
            why = {(difference.name, rank): difference for difference in sheet.differences for rank in (difference.ranks or (-1,))}
            yield Table(name, columns, [_row(row, columns, why) for row in sheet.rows])
        else:
            matter = [difference for difference in comparison.differences if difference.sheet == name]
            yield Table(name, (*COLUMNS[name], *ADDED), [(*_cells(difference), *_build_added_cells(difference)) for difference in matter])
    columns = ("sheet", "bench_name", "cmp_name", "bench_value", "cmp_value", *ADDED)
    yield Table(
        HARMLESS_SHEET, columns, [(o.sheet, o.bench_name, o.cmp_name, o.bench, o.cmp, *_build_added_cells(o)) for o in comparison.harmless]
    )
    derived = [(name, golden, target, equal) for name, (golden, target, equal) in comparison.derived.items()]
    yield Table(DERIVED_SHEET, ("quantity", "bench_value", "cmp_value", "equal"), derived)
    notes = [
        *(("not compared", text) for text in comparison.not_compared.values()),
        *(("problem", text) for text in comparison.problems),
        *(("note", text) for text in comparison.notes),
    ]
    yield Table(NOTES_SHEET, ("kind", "text"), notes)


def _summary(comparison: Comparison, old: bool) -> Table:
    rows = []
    for name, verdict in comparison.summary().items():
        sheet = comparison.sheets[name]
        matter = [difference for difference in sheet.differences if difference.matters]
        shown = verdict in (PASS, WARNING) if old else verdict
        rows.append((name, shown, sheet.compared, len(matter), sheet.severity if matter else "", len(sheet.differences) - len(matter)))
    return Table(SUMMARY_SHEET, ("filename", "pass_check", "compared", "differences", "worst", "harmless"), rows)


def _cells(one: Difference) -> tuple[Any, ...]:
    if one.sheet == difference.ENV:
        names = (one.bench_name or ONLY_CMP_HAS, one.cmp_name or ONLY_BENCH_HAS)
        return (*names, one.bench, one.cmp, one.verdict)
    if one.sheet == difference.PIP:
        return one.name, one.bench, one.cmp, one.verdict
    if one.sheet == difference.SYSTEM:
        return one.name, one.bench, one.cmp, one.verdict
    return one.file, one.bench_name, one.cmp_name, one.bench or None, one.cmp or None, one.matched or None, one.verdict


def _build_added_cells(one: Difference) -> tuple[Any, ...]:
    return one.severity, one.why, one.term or None, format_ranges(one.ranks) or None, one.where or None


def _row(row: Mapping[str, Any], columns: tuple[str, ...], why: Mapping[tuple[str, int], Difference]) -> tuple[Any, ...]:
    name = row.get("weight_name") or row.get("tag")
    if name is None or row["equal"] is True:
        return tuple(row.get(column) for column in columns)
    one = why.get((name, row["rank"])) or why.get((name, -1))
    reason = {"severity": one.severity, "why": one.why} if one is not None else {}
    return tuple({**row, **reason}.get(column) for column in columns)
