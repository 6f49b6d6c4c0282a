"""CSV text: tables that somebody else wrote, row by row with bounds on a line, a cell and the file; single lines; and rows as text."""

from __future__ import annotations

import csv
import errno
import io
import os
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from msprobe_engine.core.errors import TextError
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.regular_files import AnyPath

LONGEST_LINE = 4_000_000
"""Characters. A cell has 131,072 at most: the csv module's own limit, and what keeps a quote without an end from taking in the file."""
MOST_BYTES = 16 << 30


def read_rows(path: AnyPath, *, most: int = MOST_BYTES, errors: str = "strict") -> Iterator[list[str]]:
    """Rows of a regular file in UTF-8; an empty line is an empty row, and a zero byte is shown as an escape.

    Args:
        most: bytes that such a file can have.
        errors: what is done with bytes that are no UTF-8, as `open` has it.

    Raises:
        OSError: as `open_input`; ``EFBIG`` for a larger file. From the first row on, as all errors.
        TextError: it is no CSV, or beyond the limits.
    """
    with open_input(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes; {most} are the most", path)
        reader = csv.reader(_lines(io.TextIOWrapper(file, encoding="utf-8-sig", errors=errors, newline="")))
        try:
            yield from reader
        except csv.Error as error:
            raise TextError(str(error), line=reader.line_num, column=1) from None
        except UnicodeDecodeError as error:
            raise TextError(f"a byte after line {reader.line_num} is not UTF-8 ({error.reason})") from None


def _lines(text: TextIO) -> Iterator[str]:
    while line := text.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise TextError(f"a line has more than {LONGEST_LINE} characters")
        yield line.replace("\0", "\\0") if "\0" in line else line


def parse_row(text: str) -> list[str]:
    """The cells of one row, without limits of its own.

    Raises:
        TextError: it is none.
    """
    try:
        return next(csv.reader(io.StringIO(text, newline="")), [])
    except csv.Error as error:
        raise TextError(str(error)) from None


def format_rows(rows: Iterable[Iterable[Any]], end: str = "\n") -> str:
    """Rows as text, quoted where needed. A cell that a spreadsheet might calculate has to be made safe before (`safe_cells`)."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows(rows)
    return text.getvalue()
