"""Where the results of a comparison go: ``result.xlsx``, ``result.json`` and ``result.html`` in one directory.

Nothing of the user's is deleted. What an earlier comparison left under these names is replaced; where one cannot be written this time,
the old one gets another name, so that it is not taken for this result.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msprobe_engine.core.distribution import install_command
from msprobe_engine.core.io.output_files import guard_writing, write_report
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.config.comparison import Comparison
from msprobe_engine.find.findings import finite_json
from msprobe_engine.report.config import page, tables
from msprobe_engine.report.config.tables import Table
from msprobe_engine.report.table_files.xlsx_book import MOST_ROWS, Book, write_cell

XLSX, JSON, HTML = "result.xlsx", "result.json", "result.html"
NO_XLSX = Sentence("result.xlsx is not written: it needs xlsxwriter ({0})", install_command("xlsx"))


def write_results(comparison: Comparison, directory: str | Path, old: bool = False) -> list[Path]:
    """Write all forms of a result.

    Args:
        directory: made when it is not there.
        old: ``pass_check`` as version 8.1.1 has it.

    Returns:
        the files; a note in `comparison` says what is not there.

    Raises:
        SinkError: the directory or a file cannot be written.
    """
    place = Path(directory)
    with guard_writing(place, "name another directory with -o"):
        make_directories(os.fspath(place))
    book = place / XLSX
    if not available():
        comparison.notes.append(NO_XLSX)
        _set_aside(book)
    written = [
        write_report(place / JSON, json_text(comparison)),
        write_report(place / HTML, page.page(comparison)),
    ]
    if available():
        write_book(book, tables.tables(comparison, old))
        written.insert(0, book)
    return written


def json_text(found: Comparison) -> str:
    return finite_json(found.as_json()).decode()


def _set_aside(path: Path) -> None:
    if path.exists():
        os.replace(path, path.with_name(f"{path.stem}.earlier{path.suffix}"))


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
    with guard_writing(path), Book(path) as whole:
        for name, table in _parts(sheets, most_rows):
            _sheet(whole.book, name, table)


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
