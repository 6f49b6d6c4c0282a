"""Reads the tables of a comparison, csv and xlsx, row after row: this tool's and those of both versions of the existing one.

xlsx is Office Open XML (ECMA-376): sheets in ``xl/worksheets``, texts inline or in ``xl/sharedStrings.xml``. No package is needed.
"""

from __future__ import annotations

import csv
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

from msprobe_engine.core.io.damaged_files import DAMAGED
from msprobe_engine.errors import DumpFormatError
from msprobe_engine.sinks.names import plain_name

_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_LETTERS = re.compile(r"[A-Z]{1,3}")
_MOST_BYTES = 4 << 30
"""Of one member of an xlsx; more is no table but an attack on the memory."""

Row = list[str]


def read_table(path: Path) -> Iterator[Row]:
    """Rows of a table, the header first, as texts; of an xlsx the rows of all sheets with the header of the first.

    Raises:
        DumpFormatError: it cannot be read.
    """
    try:
        yield from _csv(path) if path.suffix == ".csv" else _xlsx(path)
    except (OSError, EOFError, csv.Error, zipfile.BadZipFile, zlib.error, ElementTree.ParseError, RuntimeError, *DAMAGED) as error:
        raise DumpFormatError(f"{path}: is no table that can be read ({error}); it was cut off or is of another program") from None


def _csv(path: Path) -> Iterator[Row]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        for row in csv.reader(file):
            yield [plain_name(cell) for cell in row]


def _xlsx(path: Path) -> Iterator[Row]:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        shared = _shared(archive) if "xl/sharedStrings.xml" in names else []
        sheets = sorted((n for n in names if re.fullmatch(r"xl/worksheets/sheet\d+\.xml", n)), key=lambda n: int(re.sub(r"\D", "", n)))
        header: Row | None = None
        for name in sheets:
            with _member(archive, name) as file:
                for row in _rows(file, shared):
                    if header is None or row != header:
                        yield row
                    header = header or row


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    if archive.getinfo(name).file_size > _MOST_BYTES:
        raise ValueError(f"{name} has {archive.getinfo(name).file_size:,} bytes")
    return archive.open(name)


def _shared(archive: zipfile.ZipFile) -> list[str]:
    texts: list[str] = []
    with _member(archive, "xl/sharedStrings.xml") as file:
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
            at = _column(cell.get("r", ""), len(row))
            row += [""] * (at + 1 - len(row))
            kind, value = cell.get("t"), cell.find(f"{_MAIN}v")
            if kind == "inlineStr":
                row[at] = _inner(cell)
            elif value is not None and value.text is not None:
                row[at] = shared[int(value.text)] if kind == "s" else value.text
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
