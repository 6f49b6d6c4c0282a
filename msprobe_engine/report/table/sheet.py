"""One table as a spreadsheet file: xlsx or csv. No cell is ever a formula."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.safe_cells import safe_cell
from msprobe_engine.report.table_files import check_format, unwritable
from msprobe_engine.report.table_files.xlsx_book import Book, write_cell

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
    try:
        if path.suffix == ".xlsx":
            check_format("xlsx")
            with Book(path) as whole:
                sheet = whole.book.add_worksheet()
                for number, cells in enumerate([header, *rows]):
                    for column, cell in enumerate(cells):
                        write_cell(sheet, number, column, cell)
        else:
            write_file(path, [_csv(header, rows)])
    except OSError as error:
        raise unwritable(path, error) from error


def _csv(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> bytes:
    lines = [",".join(safe_cell(c) if isinstance(c, str) else "" if c is None else repr(c) for c in cells) for cells in [header, *rows]]
    return b"\xef\xbb\xbf" + "".join(f"{line}\r\n" for line in lines).encode("utf-8", "backslashreplace")
