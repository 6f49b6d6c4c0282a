"""What a monitor has written into a directory, by names, sizes and first and last lines: for `msprobe show`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from msprobe_engine.core.errors import TextError
from msprobe_engine.core.io.csv_text import parse_row
from msprobe_engine.core.log import one_line
from msprobe_engine.formats.monitor.losses import FILE, lost_in
from msprobe_engine.formats.monitor.reader_csv import ALERTS_FILE, families_of, first_step
from msprobe_engine.formats.monitor.run_layout import RankDirectory, launch_of, of_other_runs, open_file, rank_directories

SCALARS = "scalars"
_SPAN = 4096
"""Bytes at the end of a table in which its last line is looked for."""
_OVER = b'"over":true'
"""In the line of an alert: it says that an earlier one is over."""


@dataclass
class Listing:
    """The directories of ranks below one monitor directory.

    Attributes:
        ranks: global ranks, each once.
        directories: how many there are; more than ranks after a restart.
        first, last: steps of the tables; None without tables.
        nbytes: of all of them.
        alerts: lines of the files of alerts, but for those that say that one is over.
        lost: what the files say that the run has lost, in sentences.
        ended: how many directories say which way the run ended.
        others: directories of other runs, which are counted in nothing else.
    """

    ranks: tuple[int, ...] = ()
    directories: int = 0
    first: int | None = None
    last: int | None = None
    families: tuple[str, ...] = ()
    files: int = 0
    nbytes: int = 0
    alerts: int = 0
    lost: list[str] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    others: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "ranks": list(self.ranks),
            "directories": self.directories,
            "steps": None if self.first is None else [self.first, self.last],
            "families": list(self.families),
            "files": self.files,
            "bytes": self.nbytes,
            "alerts": self.alerts,
            "lost": self.lost,
            "ended": dict(self.ended),
            "others": self.others,
        }


def list_monitor(root: Path) -> Listing | None:
    """What the directories of ranks in `root` hold, None when there are none. What cannot be read is left out.

    Raises:
        UsageError: `root` cannot be listed.
    """
    everything = rank_directories(root)
    if not everything:
        return None
    by_rank: dict[int, list[RankDirectory]] = {}
    for directory in sorted(everything, key=lambda each: (each.began, each.path.name)):
        by_rank.setdefault(directory.rank, []).append(directory)
    of_this_run = [
        directory
        for launches in by_rank.values()
        for directory in launches[len(of_other_runs(launch_of(each.info) for each in launches)) :]
    ]
    out = Listing(tuple(sorted({directory.rank for directory in of_this_run})), len(of_this_run), others=len(everything) - len(of_this_run))
    families: dict[str, None] = {}
    for directory in of_this_run:
        if end := _end_of(directory.info.get("ended")):
            out.ended[end] += 1
        tables: list[os.DirEntry[str]] = []
        for entry in _entries(directory.path):
            out.files += 1
            out.nbytes += _size(entry)
            out.alerts += _alerts(directory.path / ALERTS_FILE) if entry.name == ALERTS_FILE else 0
            if entry.name == FILE:
                out.lost += lost_in(Path(entry.path))
            if of := families_of(entry.name):
                families.update(dict.fromkeys(family for family in of if family != SCALARS))
                tables.append(entry)
        _steps(tables, out)
    out.families = tuple(sorted(families))
    return out


def _end_of(ended: Any) -> str:
    """What run.json says of the end where that was none of its own, as an addition to a sentence."""
    if not isinstance(ended, Mapping) or ended.get("how") not in ("exception", "signal"):
        return ""
    parts = [str(ended[key])[:_SPAN] for key in ("error", "message") if ended.get(key)] or ["a signal"]
    where = f" ({str(ended['where'])[:_SPAN]})" if ended.get("where") else ""
    return one_line(f"ended by {': '.join(parts)}{where}")


def _steps(tables: list[os.DirEntry[str]], out: Listing) -> None:
    """The range of steps of a directory: of its numbers of the steps, which every step has; of the existing tool, which has none, of any
    table; where nothing can be read, what the names say."""
    numbers = [entry for entry in tables if SCALARS in families_of(entry.name)]
    steps = [step for entry in _ends(numbers or tables) for step in _ends_of(Path(entry.path))]
    for step in steps or [first_step(entry.name) for entry in tables]:
        out.first = step if out.first is None else min(out.first, step)
        out.last = step if out.last is None else max(out.last, step)


def _ends(entries: list[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    order = sorted(entries, key=lambda entry: first_step(entry.name))
    return [*order[:1], *order[-1:]]


def _ends_of(path: Path) -> list[int]:
    """The step of the first and of the last whole line of a table."""
    try:
        with open_file(path) as file:
            lines = [file.readline(_SPAN), file.readline(_SPAN), _last_line(file)]
        header, *rows = (parse_row(line.decode(errors="replace")) for line in lines)
    except (OSError, TextError):
        return []
    at = header.index("step") if "step" in header else len(header)
    return [int(row[at]) for row in rows if at < len(row) and row[at].isascii() and row[at].isdigit() and len(row[at]) < 19]


def _last_line(file: BinaryIO) -> bytes:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - _SPAN, 0))
    whole = file.read(_SPAN).rpartition(b"\n")[0]
    return whole.rpartition(b"\n")[2]


def _alerts(path: Path) -> int:
    try:
        with open_file(path) as file:
            return sum(line.endswith(b"\n") and _OVER not in line for line in iter(lambda: file.readline(1 << 20), b""))
    except OSError:
        return 0


def _entries(directory: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return [entry for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:
        return []


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:  # gone meanwhile: the run still writes
        return 0
