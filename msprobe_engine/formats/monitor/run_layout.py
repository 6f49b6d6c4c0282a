"""Where the files of a monitored run are: directories of ranks, their time stamps, files in them. Links are not followed.

A launch goes on with what is there when its launcher says that it has started the job again, or when its first step comes after the first
one that is there. One that begins anew, at that step or before it, is another run: the last one is read, and the others are named.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.formats.monitor.series import whole

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_STAMP = re.compile(r"([A-Z][a-z]{2})(\d\d)_(\d\d)-(\d\d)-(\d\d)", re.ASCII)
_RANK_DIRECTORY = re.compile(r"([A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d)-rank(\d{1,7})-[0-9a-zA-Z]+", re.ASCII)
_V2_DIRECTORY = re.compile(r"rank_(\d{1,7})", re.ASCII)
_DAY = 86400.0
RUN_FILE = "run.json"


class Stamp(NamedTuple):
    """A time without a year, as directory names have it: ``Dec03_21-34-40``. Compares in the order of one year."""

    month: int
    day: int
    hour: int
    minute: int
    second: int

    def __str__(self) -> str:
        return f"{MONTHS[self.month - 1]}{self.day:02}_{self.hour:02}-{self.minute:02}-{self.second:02}"


def parse_stamp(text: str) -> Stamp | None:
    """The stamp that `text` is, None when it is none."""
    match = _STAMP.fullmatch(text)
    if match is None or match[1] not in MONTHS:
        return None
    stamp = Stamp(MONTHS.index(match[1]) + 1, *(int(match[i]) for i in range(2, 6)))
    return stamp if 1 <= stamp.day <= 31 and stamp.hour < 24 and stamp.minute < 60 and stamp.second < 60 else None


def stamp_argument(text: str, what: str) -> Stamp:
    """As `parse_stamp`, for what a user has written.

    Raises:
        UsageError: it is no stamp.
    """
    stamp = parse_stamp(text)
    if stamp is None:
        raise UsageError(f"{what}: {text!r} is no time stamp; write it as directory names have it, like Dec03_21-34-40")
    return stamp


def between(stamp: Stamp, first: Stamp | None, last: Stamp | None) -> bool:
    """True when `stamp` lies in the range, both ends included. A range whose first is later in the year than its last goes over
    New Year."""
    if first is not None and last is not None and first > last:
        return stamp >= first or stamp <= last
    return (first is None or stamp >= first) and (last is None or stamp <= last)


class RankDirectory(NamedTuple):
    """A directory with the tables of one rank.

    Attributes:
        rank: global rank.
        stamp: time in its name, None where there is none.
        began: when it was made, seconds since 1970: what run.json says, else the stamp in the last possible year before its last change.
        info: content of run.json, ``{}`` without.
    """

    path: Path
    rank: int
    stamp: Stamp | None
    began: float
    info: dict[str, Any]


def rank_directory(path: Path) -> RankDirectory | None:
    """What the name of `path` says about it, None when it is no directory of a rank."""
    name = path.name
    if (match := _RANK_DIRECTORY.fullmatch(name)) is not None and (stamp := parse_stamp(match[1])) is not None:
        rank, made = int(match[2]), stamp
    elif (match := _V2_DIRECTORY.fullmatch(name)) is not None:
        rank, made = int(match[1]), None
    else:
        return None
    info = read_info(path)
    began = info.get("started_unix")
    if not isinstance(began, (int, float)) or isinstance(began, bool) or not math.isfinite(began):
        began = _seconds(made, path)
    return RankDirectory(path, rank, made, float(began), info)


def rank_directories(root: Path, rank: int | None = None, entries: Iterable[os.DirEntry[str]] | None = None) -> list[RankDirectory]:
    """Directories of ranks below `root`, by rank, the oldest first.

    Args:
        rank: only its own; nothing of the others is read.
        entries: what is in `root`, where that was listed before.

    Raises:
        UsageError: `root` cannot be listed.
    """
    found = []
    for entry in scan(root) if entries is None else entries:
        if rank is not None and not _may_be_of(entry.name, rank):
            continue
        if entry.is_dir(follow_symlinks=False) and (directory := rank_directory(Path(entry.path))) is not None:
            found.append(directory)
    return sorted(found, key=lambda d: (d.rank, d.began, d.path.name))


def _may_be_of(name: str, rank: int) -> bool:
    match = _RANK_DIRECTORY.fullmatch(name)
    number = match[2] if match is not None else match[1] if (match := _V2_DIRECTORY.fullmatch(name)) is not None else ""
    return bool(number) and int(number) == rank


def scan(directory: Path) -> list[os.DirEntry[str]]:
    """Entries of a directory, by name.

    Raises:
        UsageError: it cannot be listed.
    """
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"{directory}: cannot be listed ({error.strerror or error}); check the path, owner and mode") from None


def read_info(directory: Path) -> dict[str, Any]:
    """run.json of a directory, ``{}`` when there is none or it is no object."""
    try:
        with open_file(directory / RUN_FILE) as file:
            info = parse_json(file.read(1 << 24))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened, is a link or is no regular file.
    """
    with open_input(path, follow=False) as file:
        yield file


def _seconds(stamp: Stamp | None, path: Path) -> float:
    try:
        changed = path.stat(follow_symlinks=False).st_mtime
    except OSError:
        changed = 0.0
    if stamp is None:
        return changed
    year = time.localtime(changed).tm_year
    for candidate in (year + 1, year, year - 1):
        began = time.mktime((candidate, *stamp, 0, 0, -1))
        if began <= changed + _DAY:  # a stamp may be in the time of another zone
            return began
    return changed


class Launch(NamedTuple):
    """What is known of one.

    Attributes:
        key: tells it from others; empty: the files do not say.
        started: when, as run.json has it; empty: unknown.
        restart: the launcher has started the job again.
        first: its first step; None: it has none, or does not say.
    """

    key: str
    started: str = ""
    restart: bool = False
    first: int | None = None


def launch_of(info: Mapping[str, Any]) -> Launch:
    """The launch that run.json is of."""
    key, started = (str(info.get(name) or "") for name in ("launch", "started"))
    return Launch(key, started, info.get("restart") is True, whole(info.get("first_step")))


def begins_anew(launch: Launch, before: Iterable[Launch]) -> bool:
    """Is a launch that has begun no continuation of those before it?"""
    there = [one.first for one in before if one.first is not None]
    return bool(launch.key) and not launch.restart and launch.first is not None and bool(there) and launch.first <= min(there)


def of_other_runs(launches: Iterable[Launch]) -> list[Launch]:
    """Of launches in the order in which they began, those that the last run has not gone on with."""
    others: list[Launch] = []
    chain: list[Launch] = []
    for launch in launches:
        if begins_anew(launch, chain):
            others += chain
            chain = []
        chain.append(launch)
    return others


def describe_skipped_launch(skipped: Launch, read: Launch) -> str:
    skipped_start, read_start = (launch.started or "at an unknown time" for launch in (skipped, read))
    return f"another run, which started {skipped_start}, is here and is not looked at; the one that is read started {read_start}"


def stored_launch(row: Iterable[Any]) -> Launch:
    """A row of the table ``launches`` of a trend data base, whatever is in it: key, started, restart, first step."""
    key, started, restart, first = row
    return Launch(str(key), str(started or ""), restart == 1, whole(first))
