"""An xlsx file, whole or not at all, and its cells. Nothing in a cell is ever a formula or a link."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from msprobe_engine.core.io.output_files import WholeFile
from msprobe_engine.report.table_files.tablefile import unwritable

MOST_ROWS = 1_048_576
"""Of a sheet, with its head (limits of Excel)."""
_LONGEST = 32_767
"""Characters of a cell (limits of Excel)."""
_CUT = "... (cut)"
_OPTIONS = {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False}


class Book:
    """A workbook whose rows are not kept in memory: a sheet is written row by row.

    Attributes:
        book: the `xlsxwriter.Workbook`.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        import xlsxwriter

        self.path = path
        self._scratch = tempfile.mkdtemp(prefix=".xlsx.", dir=path.parent)  # the writer's own files of rows
        try:
            self._whole = WholeFile(path)
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        self.book = xlsxwriter.Workbook(self._whole.file, {**_OPTIONS, "tmpdir": self._scratch})

    def finish(self) -> None:
        """Everything is written; `commit` gives the file its name.

        Raises:
            SinkError: it cannot be written, or is too large for the format.
        """
        import xlsxwriter.exceptions

        try:
            self.book.close()
        except xlsxwriter.exceptions.XlsxWriterException as error:
            cause = error.args[0] if error.args else error  # the system's error, or that the table is too large
            raise unwritable(self.path, cause if isinstance(cause, OSError) else OSError(0, str(cause))) from error
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def commit(self) -> None:
        """The file is there.

        Raises:
            OSError: it cannot get its name.
        """
        self._whole.commit()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self.book.close()
        self._whole.abort()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Book:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finish()
            self.commit()
        except BaseException:
            self.abort()
            raise


def write_cell(sheet: Any, row: int, column: int, cell: Any, colour: Any = None) -> None:
    """Write one cell: a number where a spreadsheet holds it exactly, else text; None is empty."""
    if cell is None:
        if colour is not None:
            sheet.write_blank(row, column, None, colour)
    elif isinstance(cell, bool):
        sheet.write_boolean(row, column, cell, colour)
    elif (isinstance(cell, float) and math.isfinite(cell)) or (isinstance(cell, int) and abs(cell) < 2**53):
        sheet.write_number(row, column, cell, colour)
    else:
        sheet.write_string(row, column, _text(str(cell)), colour)


def _text(text: str) -> str:
    """XML has no halves of surrogate pairs; the writer escapes other control characters itself."""
    if not text.isprintable():
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _LONGEST else text[: _LONGEST - len(_CUT)] + _CUT
