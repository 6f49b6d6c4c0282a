"""``result.xlsx`` as the existing tool has it: a sheet per checker. Nothing in a cell is ever a formula or a link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msprobe_engine.report.config.tables import Table
from msprobe_engine.report.table_files import unwritable
from msprobe_engine.report.table_files.xlsx_book import MOST_ROWS, Book, write_cell

_COLOURS = {"error": "#F8CBAD", "changes numerics": "#F8CBAD", "warning": "#FFE699", "may change numerics": "#FFE699"}
_WIDTHS = {"why": 80, "bench_value": 30, "cmp_value": 30, "bench_stack": 60, "cmp_stack": 60, "text": 100, "weight_name": 40}


def available() -> bool:
    """Is the package there that writes it?"""
    return find_spec("xlsxwriter") is not None


def write_book(path: Path, sheets: Iterable[Table], most_rows: int = MOST_ROWS) -> None:
    """Write the workbook, whole or not at all; a sheet that is too long becomes ``name_part_0``, ``name_part_1``.

    Raises:
        SinkError: it cannot be written.
    """
    try:
        with Book(path) as whole:
            for name, table in _parts(sheets, most_rows):
                _sheet(whole.book, name, table)
    except OSError as error:
        raise unwritable(path, error) from error


def _parts(sheets: Iterable[Table], most_rows: int) -> Iterator[tuple[str, Table]]:
    for table in sheets:
        rows = most_rows - 1
        if len(table.rows) <= rows:
            yield table.name, table
            continue
        for number, start in enumerate(range(0, len(table.rows), rows)):
            yield f"{table.name}_part_{number}", table._replace(rows=table.rows[start : start + rows])


def _sheet(book: Any, name: str, table: Table) -> None:
    sheet = book.add_worksheet(name)
    head = book.add_format({"bold": True})
    formats = {word: book.add_format({"bg_color": colour}) for word, colour in _COLOURS.items()}
    for column, title in enumerate(table.columns):
        sheet.set_column(column, column, _WIDTHS.get(title, 18))
    sheet.freeze_panes(1, 0)
    for column, title in enumerate(table.columns):
        sheet.write_string(0, column, title, head)
    for number, row in enumerate(table.rows, 1):
        for column, cell in enumerate(row):
            write_cell(sheet, number, column, cell, formats.get(cell) if isinstance(cell, str) else None)
    if table.rows:
        sheet.autofilter(0, 0, len(table.rows), len(table.columns) - 1)
