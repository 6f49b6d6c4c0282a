"""One table as a spreadsheet file: xlsx or csv. No cell is ever a formula."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import MissingExtraError, SinkError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import explain
from msprobe_engine.core.io.safe_cells import safe_cell

FORMATS = ("xlsx", "csv")
Cell = str | int | float | None


def write_sheet(path: Path, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Write a table to `path`; its suffix (``.xlsx``, ``.csv``) is the format. The file is there whole or not at all.

    None is an empty cell; NaN and infinities are text in xlsx, which has no such numbers. csv is UTF-8 with a byte order mark,
    which spreadsheet programs need to see that it is UTF-8.

    Raises:
        MissingExtraError: xlsx without the package xlsxwriter.
        SinkError: it cannot be written.
    """
    data = _xlsx(header, rows) if path.suffix == ".xlsx" else _csv(header, rows)
    try:
        write_file(path, [data])
    except OSError as error:
        raise SinkError(f"cannot write {path}: {explain(error, 'name another output directory', path=path)}") from error


def check_format(name: str) -> None:
    """Say before the work what would fail after it.

    Raises:
        MissingExtraError: `name` is ``xlsx`` and the package for it is not installed.
    """
    if name == "xlsx":
        _writer()


def _writer() -> Any:
    try:
        import xlsxwriter
    except ImportError:
        raise MissingExtraError("xlsxwriter", "xlsx", "a result as xlsx (csv needs nothing)") from None
    return xlsxwriter


def _xlsx(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> bytes:
    buffer = io.BytesIO()
    options = {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False}
    book = _writer().Workbook(buffer, options)
    sheet = book.add_worksheet()
    for row, cells in enumerate([header, *rows]):
        for column, cell in enumerate(cells):
            if cell is None:
                continue
            if isinstance(cell, str) or not math.isfinite(cell):
                sheet.write_string(row, column, str(cell))
            else:
                sheet.write_number(row, column, cell)
    book.close()
    return buffer.getvalue()


def _csv(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> bytes:
    lines = [",".join(safe_cell(c) if isinstance(c, str) else "" if c is None else repr(c) for c in cells) for cells in [header, *rows]]
    return b"\xef\xbb\xbf" + "".join(f"{line}\r\n" for line in lines).encode("utf-8", "backslashreplace")
