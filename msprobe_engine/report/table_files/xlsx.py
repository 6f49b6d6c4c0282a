"""A table as xlsx with the row colours of version 8.1.1; rows are not kept in memory.

A sheet has at most 1,048,576 rows; what is beyond goes to ``{stem}_slice_1.xlsx`` and so on, the names of the existing tool.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.io.output_files import guard_writing
from msprobe_engine.measure.columns import COLOUR
from msprobe_engine.report.table_files.tablefile import Block, unwritable
from msprobe_engine.report.table_files.xlsx_book import MOST_ROWS, Book, write_cell

_COLOURS = {"red": "#FF0000", "yellow": "#FFFF00"}


class XlsxTable:
    """See `msprobe_engine.report.table_files.Table`."""

    def __init__(self, path: Path, columns: Sequence[str], most_rows: int = MOST_ROWS) -> None:
        self.files: list[Path] = []
        self._path = path
        self._columns = [name for name in columns if name != COLOUR]
        self._most = most_rows
        self._books: list[Book] = []
        self._open_book()

    def _open_book(self) -> None:
        number = len(self._books)
        made = Book(self._path if number == 0 else self._path.with_name(f"{self._path.stem}_slice_{number}.xlsx"))
        self._books.append(made)
        book = made.book
        self._sheet = book.add_worksheet()
        self._formats = {name: book.add_format({"bg_color": colour}) for name, colour in _COLOURS.items()}
        self._row = 0
        self._sheet.freeze_panes(1, 1)
        self._line(self._columns, None)

    def write(self, block: Block) -> None:
        columns = [_cells(block[name]) for name in self._columns]
        colours = block.get(COLOUR)
        with guard_writing(self._path):
            for index, row in enumerate(zip(*columns)):
                if self._row >= self._most:
                    self._finish_book()
                    self._open_book()
                self._line(row, self._formats.get(colours[index]) if colours is not None else None)

    def _line(self, row: Sequence[Any], colour: Any) -> None:
        for column, cell in enumerate(row):
            write_cell(self._sheet, self._row, column, cell, colour)
        self._row += 1

    def _finish_book(self) -> None:
        self._sheet.autofilter(0, 0, self._row - 1, len(self._columns) - 1)
        self._books[-1].finish()

    def close(self) -> None:
        """Finish the files."""
        try:
            self._finish_book()
            for book in self._books:
                book.commit()
                self.files.append(book.path)
        except OSError as error:
            self.abort()
            raise unwritable(self._path, error) from error

    def abort(self) -> None:
        for book in self._books:
            book.abort()


def _cells(column: Any) -> Any:
    return column.tolist() if isinstance(column, np.ndarray) else column
