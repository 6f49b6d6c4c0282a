"""Going on in the files of an earlier run: which directory, and what a killed writer has left at the end of its files."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from msprobe_engine.core.errors import SettingsError, SinkError, TextError, UsageError
from msprobe_engine.core.io.csv_text import parse_row
from msprobe_engine.core.io.output_files import replace_file
from msprobe_engine.core.io.regular_files import explain, open_regular
from msprobe_engine.core.io.safe_cells import safe_cell
from msprobe_engine.core.log import get_logger
from msprobe_engine.formats.monitor.run_layout import between, rank_directories, stamp_argument

_log = get_logger()
_TAIL = 1 << 16
_ROW = re.compile(rb"^\d+,", re.MULTILINE)
"""A row begins with the number of a pipeline chunk, or of a step."""


def find_directory(root: Path, rank: int, stamps: Sequence[str]) -> Path:
    """The directory of this rank below `root` whose time stamp lies between the two stamps; of several the youngest.

    Raises:
        SettingsError: not two stamps.
        SinkError: there is none; the message holds the stamps that are there.
    """
    if len(stamps) != 2:
        raise SettingsError(f"sinks.csv.append_output: {list(stamps)}; allowed: two time stamps, like [Dec03_21-34-40, Dec03_21-40-00]")
    try:
        first, last = (stamp_argument(text, "sinks.csv.append_output") for text in stamps)
    except UsageError as error:
        raise SettingsError(str(error)) from None
    try:
        own = [d for d in rank_directories(root, rank) if d.stamp is not None]
    except UsageError as error:
        raise SinkError(f"csv sink: append_output: {error}") from None
    fitting = [d for d in own if d.stamp is not None and between(d.stamp, first, last)]
    if not fitting:
        stamps_of_rank = ", ".join(str(d.stamp) for d in own) or "none"
        raise SinkError(
            f"csv sink: append_output: {root} has no directory of rank {rank} from {stamps[0]} to {stamps[1]}; "
            f"time stamps of this rank there: {stamps_of_rank}; give a range with one of them, or leave append_output out"
        )
    return fitting[-1].path


def whole_lines(path: Path) -> int:
    """Cut a half line off the end of a file that a killed process has left; bytes removed.

    Raises:
        SinkError: the file cannot be changed, or is no regular file.
    """
    try:
        fd = open_regular(path, os.O_RDWR)
        try:
            size = keep = os.fstat(fd).st_size
            while keep:
                start = max(0, keep - _TAIL)
                newline = os.pread(fd, keep - start, start).rfind(b"\n")
                keep = start + newline + 1
                if newline >= 0:
                    break
            if path.suffix == ".csv":
                keep = _whole_row(fd, keep)
            if keep < size:
                os.ftruncate(fd, keep)
                _log.warning("%s: its last line was cut when its writer was killed; %d bytes removed", path, size - keep)
            return size - keep
        finally:
            os.close(fd)
    except OSError as error:
        raise SinkError(f"cannot go on in {path}: {explain(error, 'leave append_output out')}") from error


def _whole_row(fd: int, end: int) -> int:
    """Where the last row that is whole ends: a line may end inside of a quoted name, and its quote would take in what comes after it."""
    start = max(0, end - _TAIL)
    tail = os.pread(fd, end - start, start)
    rows = [match.start() for match in _ROW.finditer(tail)]
    return start + rows[-1] if rows and tail.count(b'"', rows[-1]) % 2 else end


def read_header(path: Path) -> list[str]:
    """Columns of a CSV file, [] when it has none.

    Raises:
        SinkError: it cannot be read, or its first line is none of a table.
    """
    try:
        with open_text(path) as file:
            return next(csv.reader(file), [])
    except (OSError, csv.Error) as error:
        raise SinkError(f"cannot read {path}: {error}; move it away, then a new file begins") from error


def open_text(path: Path) -> TextIO:
    """A CSV file for reading.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    return open(open_regular(path), encoding="utf-8", errors="backslashreplace", newline="")


def with_columns(path: Path, header: Sequence[str]) -> None:
    """Rewrite a CSV file with these columns, by name; a column that the old rows do not have is ``nan``.

    Raises:
        SinkError: the file cannot be read or replaced.
    """
    try:
        with open_text(path) as file:
            rows = list(csv.reader(file))
    except (OSError, csv.Error) as error:
        raise SinkError(f"cannot read {path}: {error}; move it away, then a new file begins") from error
    old = rows[0] if rows else []
    place = {name: i for i, name in enumerate(old)}
    lines = [",".join(map(safe_cell, header))]
    for row in rows[1:]:
        cells = [row[i] if (i := place.get(name, len(row))) < len(row) else "nan" for name in header]
        lines.append(",".join(_quote_cell(cell) for cell in cells))
    replace_file(path, ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))


def last_step(directory: Path) -> int | None:
    """Last step of the tables in a directory, None when they do not say."""
    last = None
    for path in directory.glob("*_*-*.csv"):
        try:
            header = read_header(path)
            with open(open_regular(path), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
                tail = file.read().decode("utf-8", "backslashreplace")
            row = parse_row("".join(tail.splitlines()[-1:]))
            step = int(row[header.index("step")])
        except (OSError, ValueError, IndexError, TextError, SinkError):
            continue
        last = step if last is None else max(last, step)
    return last


def _quote_cell(cell: str) -> str:
    # What was safe when it was written stays as it is: no second apostrophe.
    return safe_cell(cell) if not cell.startswith("'") else '"' + cell.replace('"', '""') + '"'
