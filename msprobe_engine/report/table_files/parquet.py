"""A table as parquet (needs pyarrow). Columns of statistics and metrics are float64; what is no number in one of them (``N/A``, the
value of an argument that is a text) stands in the column ``{name} (text)`` beside it. All other columns are text."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.io.output_files import guard_writing
from msprobe_engine.core.io.safe_cells import utf8
from msprobe_engine.measure.columns import COLOUR
from msprobe_engine.report.table_files.tablefile import Block, TableFile, unwritable

_TEXT = ("Name", "Dtype", "Shape", "MD5", "Requires_grad", "Result", "Accuracy", "Err_message", "Stack_Info", "Data_name", "Consistent")
"""Parts of the names of columns that hold no numbers."""


class ParquetTable:
    """See `msprobe_engine.report.table_files.Table`."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self.files = [path]
        self._columns = [name for name in columns if name != COLOUR]
        fields = []
        for name in self._columns:
            if _holds_numbers(name):
                fields.append((name, pyarrow.float64()))
                name += " (text)"
            fields.append((name, pyarrow.string()))
        self._schema = pyarrow.schema(fields)
        self._file = TableFile(path)
        self._writer = pyarrow.parquet.ParquetWriter(self._file.file, self._schema, compression="zstd")

    def write(self, block: Block) -> None:
        import pyarrow

        arrays: list[Any] = []
        for name in self._columns:
            cells = block[name]
            if _holds_numbers(name):
                arrays += _split_cells(cells)
            else:
                arrays.append([None if cell is None else _text(cell) for cell in cells])
        with guard_writing(self._file.path):
            self._writer.write_table(
                pyarrow.table([pyarrow.array(column, field.type) for column, field in zip(arrays, self._schema)], self._schema)
            )

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            self.abort()
            raise unwritable(self._file.path, error) from error
        self._file.close()

    def abort(self) -> None:
        with contextlib.suppress(Exception):  # else its finalizer writes into the closed file
            self._writer.close()
        self._file.abort()


def _holds_numbers(name: str) -> bool:
    return not any(part in name for part in _TEXT)


def _split_cells(cells: Any) -> tuple[Any, list[str | None]]:
    """Numbers, null where there is none, and texts, null where there is a number."""
    if isinstance(cells, np.ndarray) and cells.dtype.kind == "f":
        return cells, [None] * len(cells)
    numbers = [float(c) if type(c) is float or (type(c) is int and abs(c) < 2**53) else None for c in cells]
    return numbers, [None if c is None or n is not None else _text(c) for c, n in zip(cells, numbers)]


def _text(cell: Any) -> str:
    return utf8(cell if isinstance(cell, str) else str(cell))
