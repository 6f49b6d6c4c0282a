"""What the ranks say of an incident, as `merge` takes it: what is damaged, or made to do harm, is left out and costs its rank only.

Several ranks read them while they train, in a directory that others may write to as well.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.formats.monitor.reader_json import checked_alert

PIECE = re.compile(r"samples_rank(\d{1,9})\.jsonl")
MOST_BYTES = 64 << 20
"""Of the file of one rank."""
_TAIL = 1 << 15
"""Bytes at the end of such a file that are looked at first: samples stand in front of what its rank says, and few ranks read all files."""
_BEGIN = b'{"version": '
"""Of a line that says something of the rank; samples begin in another way."""
_MOST_RANKS = 1 << 20
_ALERT = ("rank", "severity", "message")
_COUNTS = ("nans", "infs", "count")
_STATISTICS = (*_COUNTS, "max", "min", "norm")


Mark = tuple[int, int, int]
"""Time, number and size of a file: another one when the file was replaced or has grown."""


def marks_of(directory: Path) -> dict[str, Mark]:
    """Rank files that are there."""
    out: dict[str, Mark] = {}
    for entry in os.scandir(directory):
        if PIECE.fullmatch(entry.name):
            stat = entry.stat(follow_symlinks=False)
            out[entry.name] = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
    return out


class Pieces:
    """The rank files of one incident; those that are still the same are not read again.

    Attributes:
        marks: of the files that were read last.
    """

    def __init__(self, directory: Path) -> None:
        self.marks: dict[str, Mark] = {}
        self._directory = directory
        self._texts: dict[str, str] = {}
        self._known: dict[str, dict[str, Any] | None] = {}

    def read(self) -> dict[int, dict[str, Any]]:
        """Rank to rank file, ascending."""
        marks = marks_of(self._directory)
        for name, mark in marks.items():
            if self.marks.get(name) != mark:
                self._known[name] = self._with_known_texts(_read_if_there(self._directory / name))
        self.marks = marks
        by_rank = {int(name[len("samples_rank") : -len(".jsonl")]): self._known[name] for name in marks}
        return {rank: piece for rank, piece in sorted(by_rank.items()) if piece is not None}

    def _with_known_texts(self, piece: dict[str, Any] | None) -> dict[str, Any] | None:
        """What thousands of ranks say in the same words is kept once."""
        for alert in piece["alerts"] if piece is not None else ():
            for facts in (alert, alert.get("extra")):
                for key, text in facts.items() if isinstance(facts, dict) else ():
                    facts[key] = self._texts.setdefault(text, text) if isinstance(text, str) else text
        return piece


def _read_if_there(path: Path) -> dict[str, Any] | None:
    try:
        return read_piece(path)
    except OSError:
        return None


def read_piece(path: Path) -> dict[str, Any] | None:
    """What the file of a rank says of it: the last whole line that says something, None without one.

    Raises:
        OSError: the file cannot be read.
    """
    with open_input(path, follow=False) as file:
        size = os.fstat(file.fileno()).st_size
        most = _TAIL
        while True:
            start = file.seek(max(0, size - most))
            lines = file.read(size - start).split(b"\n")[:-1]  # behind the last line break: one that is still being written
            for line in reversed(lines if start == 0 else lines[1:]):
                value = _piece(line) if line.startswith(_BEGIN) else None
                if value is not None:
                    return dict(value) | {"alerts": [checked_alert(alert, Counter()) for alert in _list(value, "alerts")]}
            if start == 0 or most >= MOST_BYTES:
                return None
            most *= 16


def _piece(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if _is_piece(value) else None


def _is_piece(value: Any) -> bool:
    """Has everything that `merge` looks at the type that `writer.write_incident` gives it?"""
    if not isinstance(value, dict):
        return False
    event, first, capture, rerun = (value.get(key) for key in ("event", "first_nonfinite", "capture", "rerun"))
    world = value.get("world_size", 1)
    return (
        isinstance(event, dict)
        and all(_is_whole(event.get(key, 0)) for key in ("step", "rank"))
        and _is_whole(world)
        and 1 <= world <= _MOST_RANKS
        and all(map(_is_whole, _list(value, "steps")))
        and all(isinstance(level, str) for level in _list(value, "levels"))
        and all(map(_is_alert, _list(value, "alerts")))
        and all(_is_record(record, _STATISTICS) for record in _list(value, "worst"))
        and (not first or _is_record(first, _COUNTS))
        and (not capture or (isinstance(capture, dict) and capture.keys() >= {"level", "steps"} and _is_whole(capture.get("first_step"))))
        and (not rerun or (isinstance(rerun, dict) and isinstance(rerun.get("differences") or [], list)))
        and isinstance(lost := value.get("lost") or {}, dict)
        and all(map(_is_whole, lost.values()))
    )


def _list(value: Mapping[str, Any], key: str) -> list[Any]:
    """A list of one thing that is nothing allowed where there is something else."""
    items = value.get(key) or []
    return items if isinstance(items, list) else [None]


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 62


def _is_alert(alert: Any) -> bool:
    return checked_alert(alert, Counter()) is not None and all(key in alert for key in _ALERT)


def _is_record(record: Any, keys: tuple[str, ...]) -> bool:
    statistics = record.get("statistics") if isinstance(record, dict) else None
    return (
        isinstance(statistics, dict)
        and _is_whole(record.get("step"))
        and _is_whole(record.get("rank", 0))
        and "name" in record
        and all(key in statistics for key in keys)
        and all(_is_whole(statistics[key]) for key in _COUNTS)
    )
