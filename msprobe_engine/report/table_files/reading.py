"""Reads the tables of a comparison, csv and xlsx, row after row: this tool's and those of both versions of the existing one.

xlsx is Office Open XML (ECMA-376): sheets in ``xl/worksheets``, texts inline or in ``xl/sharedStrings.xml``. No package is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.archives import DAMAGED_ARCHIVE, Limits, open_member, read_members
from msprobe_engine.core.io.csv_text import read_rows
from msprobe_engine.core.io.damaged_files import DAMAGED
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.safe_cells import plain_name

_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_LETTERS = re.compile(r"[A-Z]{1,3}")
_LIMITS = Limits(member=4 << 30, total=64 << 30)
_MOST_SHARED = 512 << 20
"""Bytes of the texts that sheets share: they are kept in memory."""
_MOST_COLUMNS = 16_384
"""Of Excel; a row is in memory as a whole."""

Row = list[str]


def read_table(path: Path) -> Iterator[Row]:
    """Rows of a table, the header first, as texts; of an xlsx the rows of all sheets with the header of the first.

    Raises:
        DumpFormatError: it cannot be read.
    """
    try:
        yield from _csv(path) if path.suffix == ".csv" else _xlsx(path)
    except (OSError, ElementTree.ParseError, *DAMAGED_ARCHIVE, *DAMAGED) as error:
        raise DumpFormatError(f"{path}: is no table that can be read ({error}); it was cut off or is of another program") from None


def _csv(path: Path) -> Iterator[Row]:
    for row in read_rows(path):
        yield [plain_name(cell) for cell in row]


def _xlsx(path: Path) -> Iterator[Row]:
    with open_input(path) as file:
        members = read_members(file, _LIMITS)
        shared: list[str] = []
        if (texts := members.get("xl/sharedStrings.xml")) is not None:
            if texts.file_size > _MOST_SHARED:
                raise ValueError(f"its texts have {texts.file_size:,} bytes; {_MOST_SHARED:,} are the most")
            with open_member(file, texts) as opened:
                shared = _read_shared_texts(opened)
        sheets = [name for name in members if re.fullmatch(r"xl/worksheets/sheet\d{1,9}\.xml", name)]
        header: Row | None = None
        for name in sorted(sheets, key=lambda name: int(re.sub(r"\D", "", name))):
            with open_member(file, members[name]) as opened:
                for row in _rows(opened, shared):
                    if header is None or row != header:
                        yield row
                    header = header or row


def _read_shared_texts(file: IO[bytes]) -> list[str]:
    texts: list[str] = []
    for _, element in ElementTree.iterparse(file):
        if element.tag == f"{_MAIN}si":
            texts.append(_inner(element))
            element.clear()
    return texts


def _inner(element: ElementTree.Element) -> str:
    return "".join(t.text or "" for t in element.iter(f"{_MAIN}t"))


def _rows(file: IO[bytes], shared: list[str]) -> Iterator[Row]:
    for _, element in ElementTree.iterparse(file):
        if element.tag != f"{_MAIN}row":
            continue
        row: Row = []
        for cell in element.iter(f"{_MAIN}c"):
            column = _column(cell.get("r", ""), len(row))
            if column >= _MOST_COLUMNS:
                raise ValueError(f"a row has more than {_MOST_COLUMNS} columns")
            row += [""] * (column + 1 - len(row))
            kind, value = cell.get("t"), cell.find(f"{_MAIN}v")
            if kind == "inlineStr":
                row[column] = _inner(cell)
            elif value is not None and value.text is not None:
                row[column] = shared[int(value.text)] if kind == "s" else value.text
        yield row
        element.clear()


def _column(reference: str, following: int) -> int:
    letters = _LETTERS.match(reference)
    if letters is None:
        return following
    number = 0
    for letter in letters[0]:
        number = number * 26 + ord(letter) - ord("A") + 1
    return number - 1
