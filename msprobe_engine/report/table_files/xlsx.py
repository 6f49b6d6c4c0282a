"""A table as xlsx with the row colours of version 8.1.1; rows are not kept in memory.

A sheet has at most 1,048,576 rows; what is beyond goes to ``{stem}_slice_1.xlsx`` and so on, the names of the existing tool.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.io.output_files import WholeFile
from msprobe_engine.measure.columns import COLOUR
from msprobe_engine.report.table_files import Block, unwritable

MOST_ROWS = 1_048_576
"""Of a sheet, with the header (limits of Excel)."""
_LONGEST = 32_767
"""Characters of a cell (limits of Excel)."""
_CUT = "... (cut)"
_COLOURS = {"red": "#FF0000", "yellow": "#FFFF00"}
_OPTIONS = {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "strings_to_numbers": False}


class XlsxTable:
    """See `msprobe_engine.report.table_files.Table`."""

    def __init__(self, path: Path, columns: Sequence[str], most_rows: int = MOST_ROWS) -> None:
        self.files: list[Path] = []
        self._path = path
        self._columns = [name for name in columns if name != COLOUR]
        self._most = most_rows
        self._done: list[WholeFile] = []
        self._scratch = tempfile.mkdtemp(prefix=".xlsx.", dir=path.parent)  # the writer's own files of rows
        try:
            self._begin()
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise

    def _begin(self) -> None:
        import xlsxwriter

        number = len(self._done)
        path = self._path if number == 0 else self._path.with_name(f"{self._path.stem}_slice_{number}.xlsx")
        whole = WholeFile(path)
        self._done.append(whole)
        self._book = xlsxwriter.Workbook(whole.file, {**_OPTIONS, "tmpdir": self._scratch})
        self._sheet = self._book.add_worksheet()
        self._formats = {name: self._book.add_format({"bg_color": colour}) for name, colour in _COLOURS.items()}
        self._row = 0
        self._sheet.freeze_panes(1, 1)
        self._line(self._columns, None)

    def write(self, block: Block) -> None:
        """Append rows."""
        columns = [_cells(block[name]) for name in self._columns]
        colours = block.get(COLOUR)
        try:
            for index, row in enumerate(zip(*columns)):
                if self._row >= self._most:
                    self._finish_book()
                    self._begin()
                self._line(row, self._formats.get(colours[index]) if colours is not None else None)
        except OSError as error:  # rows go through files of the temporary directory
            raise unwritable(self._path, error) from error

    def _line(self, row: Sequence[Any], colour: Any) -> None:
        sheet, at = self._sheet, self._row
        for column, cell in enumerate(row):
            if cell is None:
                if colour is not None:
                    sheet.write_blank(at, column, None, colour)
            elif (type(cell) is float and math.isfinite(cell)) or (type(cell) is int and abs(cell) < 2**53):
                sheet.write_number(at, column, cell, colour)
            elif isinstance(cell, bool):
                sheet.write_boolean(at, column, cell, colour)
            else:
                sheet.write_string(at, column, _text(cell), colour)
        self._row += 1

    def _finish_book(self) -> None:
        import xlsxwriter.exceptions

        self._sheet.autofilter(0, 0, self._row - 1, len(self._columns) - 1)
        try:
            self._book.close()
        except xlsxwriter.exceptions.FileCreateError as error:
            cause = error.args[0] if error.args else error  # the system's error, or that the table is too large for the format
            raise unwritable(self._path, cause if isinstance(cause, OSError) else OSError(0, str(cause))) from error

    def close(self) -> None:
        """Finish the files."""
        try:
            self._finish_book()
            for whole in self._done:
                whole.commit()
                self.files.append(whole.path)
        except OSError as error:
            self.abort()
            raise unwritable(self._path, error) from error
        shutil.rmtree(self._scratch, ignore_errors=True)

    def abort(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(Exception):
            self._book.close()
        for whole in self._done:
            whole.abort()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _cells(column: Any) -> Any:
    return column.tolist() if isinstance(column, np.ndarray) else column


def _text(cell: Any) -> str:
    """A cell of text: XML has no other control characters than tab and line break; the writer escapes those itself."""
    text = cell if isinstance(cell, str) else str(cell)
    if not text.isprintable():
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _LONGEST else text[: _LONGEST - len(_CUT)] + _CUT
