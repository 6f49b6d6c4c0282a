"""A table as csv (RFC 4180, UTF-8, lines end with a line feed). Numbers are written by repr, so that they read back as the same.

The text of a block is made by `msprobe_engine/native/_tabletext.c` where it was built, and else by `lines` here, with the same result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.io.safe_cells import safe_cell, utf8
from msprobe_engine.formats.number_text import load_native
from msprobe_engine.measure.columns import COLOUR
from msprobe_engine.report.table_files.tablefile import Block, TableFile

Words = tuple[str, str, str]
"""Cells of floats that are no finite numbers: NaN, infinity, minus infinity."""

PLAIN: Words = ("nan", "inf", "-inf")
COMPAT: Words = ("", " inf", " -inf")
"""As 26.2.0 writes them: a spreadsheet shows ``inf`` as an error, hence the blank."""

_SIGNED_NUMBER = re.compile(r"[+-](?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?%?|inf)", re.ASCII)


def cell_text(value: Any) -> str:
    """One cell of anything but floats. A text with a sign in front that is a number stays as it is: there is nothing to run in it."""
    if value is None:
        return ""
    text = utf8(value if isinstance(value, str) else str(value))
    if not isinstance(value, str) or (text[:1] in ("+", "-") and _SIGNED_NUMBER.fullmatch(text)):
        return text if "," not in text and '"' not in text and "\n" not in text and "\0" not in text else safe_cell(text)
    return safe_cell(text)


def lines(columns: Sequence[Any], words: Words) -> str:
    """The lines of a block, in Python."""
    nan, inf, minus_inf = words

    def texts(column: Any) -> list[str]:
        items = column.tolist() if isinstance(column, np.ndarray) else column
        return [_float(item) if type(item) is float else cell_text(item) for item in items]

    def _float(value: float) -> str:
        if value - value == 0:
            return repr(value)
        return nan if value != value else inf if value > 0 else minus_inf

    return "".join(",".join(row) + "\n" for row in zip(*map(texts, columns)))


def block_bytes(columns: Sequence[Any], rows: int, words: Words = PLAIN) -> bytes:
    """The lines of a block of `rows` rows; `columns` are lists or arrays."""
    module = load_native()
    if module is None:
        return lines(columns, words).encode()
    given = [
        np.ascontiguousarray(c, dtype=np.float64)
        if isinstance(c, np.ndarray) and c.dtype.kind == "f"
        else c
        if type(c) is list
        else c.tolist()
        if isinstance(c, np.ndarray)
        else list(c)
        for c in columns
    ]
    data: bytes = module.lines(given, rows, *(word.encode() for word in words), cell_text)
    return data


class CsvTable:
    """See `msprobe_engine.report.table_files.Table`."""

    def __init__(self, path: Path, columns: Sequence[str], compat: bool = False) -> None:
        self.files = [path]
        self._columns = list(columns)
        self._words = COMPAT if compat else PLAIN
        self._file = TableFile(path)
        self._file.write((",".join(map(cell_text, columns)) + "\n").encode())

    def write(self, block: Block) -> None:
        columns = [block[name] for name in self._columns if name != COLOUR]
        rows = len(columns[0]) if columns else 0
        if rows:
            self._file.write(block_bytes(columns, rows, self._words))

    def close(self) -> None:
        self._file.close()

    def abort(self) -> None:
        self._file.abort()
