"""``result.xlsx`` as the existing tool has it: a sheet per checker. Nothing in a cell is ever a formula or a link."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.output_files import WholeFile
from msprobe_engine.report.config.tables import Table
from msprobe_engine.report.table_files import unwritable

MOST_ROWS = 1_048_576
"""Of a sheet, with its head (limits of Excel); longer ones become ``name_part_0``, ``name_part_1``."""
_LONGEST = 32_767
"""Characters of a cell (limits of Excel)."""
_CUT = "... (cut)"
_OPTIONS = {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False}
_COLOURS = {"error": "#F8CBAD", "changes numerics": "#F8CBAD", "warning": "#FFE699", "may change numerics": "#FFE699"}
_WIDTHS = {"why": 80, "bench_value": 30, "cmp_value": 30, "bench_stack": 60, "cmp_stack": 60, "text": 100, "weight_name": 40}


def available() -> bool:
    """Is the package there that writes it?"""
    return find_spec("xlsxwriter") is not None


def write_book(path: Path, sheets: Iterable[Table], most_rows: int = MOST_ROWS) -> None:
    """Write the workbook, whole or not at all.

    Raises:
        SinkError: it cannot be written.
    """
    import xlsxwriter
    import xlsxwriter.exceptions

    scratch = tempfile.mkdtemp(prefix=".xlsx.", dir=path.parent)
    try:
        with WholeFile(path) as whole:
            book = xlsxwriter.Workbook(whole.file, {**_OPTIONS, "tmpdir": scratch})
            try:
                for name, table in _parts(sheets, most_rows):
                    _sheet(book, name, table)
            finally:
                book.close()
    except (OSError, xlsxwriter.exceptions.FileCreateError) as error:
        raise unwritable(path, error if isinstance(error, OSError) else OSError(str(error))) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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
            _cell(sheet, number, column, cell, formats.get(cell) if isinstance(cell, str) else None)
    if table.rows:
        sheet.autofilter(0, 0, len(table.rows), len(table.columns) - 1)


def _cell(sheet: Any, row: int, column: int, cell: Any, colour: Any) -> None:
    if cell is None:
        return
    if isinstance(cell, bool):
        sheet.write_boolean(row, column, cell)
    elif isinstance(cell, (int, float)) and math.isfinite(cell) and abs(cell) < 2**53:
        sheet.write_number(row, column, cell)
    else:
        sheet.write_string(row, column, _text(str(cell)), colour)


def _text(text: str) -> str:
    """XML has no halves of surrogate pairs; the writer escapes other control characters itself."""
    if not text.isprintable():
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _LONGEST else text[: _LONGEST - len(_CUT)] + _CUT
