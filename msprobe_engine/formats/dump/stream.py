"""Reads the records of a dump file one block after another, so that a file of gigabytes never becomes one tree of objects.

Both this tool and the existing one write dump.json with an indentation of one blank per level (``json.dump(indent=1)``): the name of a
record stands behind a line break and exactly two blanks, and nothing else does, because line breaks inside of texts are escaped. Files that
are written in another way are read in one piece.

>>> with open_records(path) as records:        # doctest: +SKIP
...     for block in records:                  # {name: record} of a few thousand records
...         ...
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from msprobe_engine.core.errors import DumpFormatError, TextError, UnreadableFileError
from msprobe_engine.core.io.json_text import parse_json as parse_text
from msprobe_engine.core.io.regular_files import OddFileError
from msprobe_engine.formats.dump import frame_log, layout
from msprobe_engine.formats.dump.find_dumps import nearby
from msprobe_engine.formats.dump.frame_log import why_unfinished
from msprobe_engine.formats.dump.rank_files import MOST_BYTES, parse_json, parse_object, read_bytes
from msprobe_engine.formats.dump.ring_file import has_step_file, open_step_file

BLOCK = 1 << 20
"""Bytes of the file that are turned into objects at a time; more than the caches of a core hold would cost time, not save some."""

_DATA = b'\n "data": {'
_NAME = b'\n  "'
_END = b"\n }"
_INSIDE = tuple(b' "%s": ' % name.encode() for name in layout.COMPANIONS)
"""What the lines begin with that hold the companions; they are read when they are asked for."""
_LONGEST_HEADER = 1 << 20


class Records:
    """The header of a dump file, and its records in blocks, in the order of the file.

    Attributes:
        header: all keys but ``data``; those that stand behind the data only after the last block.
        recovered: read from the frame log of a process that was killed before it wrote the file.
        repeated: records of a block that another of the same name stands behind, so far; JSON gives only the last.
    """

    def __init__(self, path: Path, header: dict[str, Any], blocks: Iterator[dict[str, Any]], recovered: bool = False) -> None:
        self.path = path
        self.header = header
        self.recovered = recovered
        self.repeated = 0
        self._blocks = blocks

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._blocks


@contextmanager
def open_records(path: Path, block: int = BLOCK) -> Iterator[Records]:
    """Open a ``dump.json`` or ``debug.json``, or the frame log that a killed process left in its place.

    Raises:
        DumpFormatError: there is no such file, or it is damaged (from the iteration too); file and cause are named.
    """
    log = path.parent / layout.FRAME_LOG
    unfinished = (path.parent / layout.MARKER).exists() and log.is_file() and path.name == layout.DUMP
    if unfinished or not has_step_file(path):
        if path.name != layout.DUMP or not log.is_file():
            why = why_unfinished(path.parent)
            stopped = (
                f"the run could not write it: {why}"
                if why
                else "the run was stopped before it wrote this step, or this is no directory of a rank"
            )
            hint = nearby(path) or f"; {stopped}"
            raise DumpFormatError(f"{path}: is not there{hint}")
        text = frame_log.decode(read_bytes(log), str(log)).dump_json(str(log))
        yield _in_one_piece(text, log, recovered=True)
        return
    try:
        file = open_step_file(path)
    except OddFileError:
        raise UnreadableFileError(f"{path}: is no regular file; no dump has such a file, do not trust it") from None
    except OSError as error:
        raise DumpFormatError(f"{path}: cannot be read ({error.strerror}); check owner and mode") from None
    with file:
        head = file.read(block)
        parts = split_header(head)
        if parts is None:
            rest = file.read(MOST_BYTES)
            if len(rest) == MOST_BYTES:
                raise DumpFormatError(f"{path}: is no dump with one record after the other, and has more than {MOST_BYTES >> 30} GiB")
            yield _in_one_piece(head + rest, path)
            return
        yield _in_blocks(path, parts[0], file, parts[1], block)


def split_header(text: bytes) -> tuple[bytes, bytes] | None:
    """The header as JSON, and what stands behind it, from the first record on, of the beginning of a file or more of it; None where the
    records do not stand one after the other."""
    start = text.find(_DATA, 0, _LONGEST_HEADER)
    if start < 0 or text[start + len(_DATA) : start + len(_DATA) + len(_NAME)] != _NAME:
        return None
    return text[:start].rstrip().rstrip(b",") + b"\n}", text[start + len(_DATA) :]


def records_of(path: Path, head: bytes, body: bytes) -> Records:
    """The records of a text that was read and split; `path` is named in errors.

    Raises:
        DumpFormatError: as `open_records`.
    """
    return _in_blocks(path, head, io.BytesIO(), body, BLOCK)


def _in_blocks(path: Path, head: bytes, file: BinaryIO, rest: bytes, size: int) -> Records:
    records = Records(path, parse_object(head, path), iter(()))
    records._blocks = _blocks(path, records, file, rest, size)
    return records


def _in_one_piece(data: bytes, path: Path, recovered: bool = False) -> Records:
    repeated = of_data = 0

    def build_object(items: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated, of_data
        found = dict(items)
        repeated += len(items) - len(found)
        of_data = sum(key == "data" for key, _ in items) if len(items) > len(found) else 0  # the object that ends last is the whole file
        return found

    document = parse_object(data, path, build_object)
    if of_data > 1:
        raise _two_data(path)
    records = document.pop("data", None)
    for name in layout.COMPANIONS:
        if layout.holds_inside(document, name):
            document.pop(name, None)
    if not isinstance(records, dict):
        raise DumpFormatError(f"{path}: key 'data' is {'missing' if records is None else 'no JSON object'}; this is no dump file")
    made_of = Records(path, document, iter([records]), recovered)
    made_of.repeated = repeated
    return made_of


def _two_data(path: Path) -> DumpFormatError:
    return DumpFormatError(f"{path}: key 'data' stands there more than once; which records count cannot be told. Dump the step again")


def _blocks(path: Path, records: Records, file: BinaryIO, rest: bytes, size: int) -> Iterator[dict[str, Any]]:
    """`rest` begins at the first record; blocks are cut in front of a record's name."""
    line = 0  # of the file, in front of `rest`; the header's lines are not worth counting exactly
    while True:
        more = file.read(size)
        cut = (rest + more).rfind(_NAME) if more else -1
        if not more:
            break
        rest += more
        if cut <= 0:
            continue
        yield _block(rest[:cut], path, line, records)
        line += rest.count(b"\n", 0, cut)
        rest = rest[cut:]
    end = rest.rfind(_END)
    last, behind = (rest[:end], rest[end + len(_END) :]) if end >= 0 else (rest, b"")
    tail = b"\n".join(line for line in behind.split(b"\n") if not line.startswith(_INSIDE)).strip()
    if not tail.endswith(b"}"):
        raise DumpFormatError(
            f"{path}: ends in the middle; it was cut off while being written (killed process or full disk). "
            "Leave the step out or dump it again"
        )
    yield _block(last, path, line, records)
    later = parse_json(b"{" + tail[:-1].strip(b", \n") + b"}", path)
    if "data" in later:
        raise _two_data(path)
    records.header.update(later)


def _block(text: bytes, path: Path, line: int, records: Records) -> dict[str, Any]:
    try:
        block: dict[str, Any] = parse_text(b"{" + text.rstrip(b", \t\r\n") + b"}")
    except TextError as error:
        advice = "is damaged or was edited. Leave the step out or dump it again"
        if error.line is None:
            advice = "is damaged or no dump file, do not trust it"
        raise DumpFormatError(f"{path}: about line {line + (error.line or 0)}: {error.problem}; it {advice}") from None
    records.repeated += max(0, text.count(_NAME) - len(block))
    return block


def read_record(path: Path, name: str) -> dict[str, Any]:
    """One record as the file has it; empty where there is none of this name.

    Raises:
        DumpFormatError: as `open_records`.
    """
    with open_records(path) as records:
        for block in records:
            record = block.get(name)
            if isinstance(record, dict):
                return record
    return {}
