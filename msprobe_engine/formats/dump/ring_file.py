"""The steps that a rank had kept when an incident began, in one file: thousands of ranks write theirs at the same moment, and a file for
each step would be a create for each.

::

    incidents/step12-nan_inf/ring_rank{R}.steps

For each step a line ``#msprobe step 12, 34567 bytes`` and so many bytes: what its dump.json would hold. A step that stands there more than
once counts as it was written last. Such a line stands nowhere in JSON, so one step that was cut off or damaged costs no other.

Readers know a step by the path that a file of its own would have, ``step12/rank{R}/dump.json``, and ask for it here. Where there is such
a file (earlier versions wrote one for each step) it counts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from msprobe_engine.core.io.input_files import open_input, open_part, read_opened
from msprobe_engine.core.io.output_files import write_all
from msprobe_engine.core.io.regular_files import open_regular
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump import layout

Ring = tuple[int, Path]
"""Rank and file."""
_NAME = re.compile(r"ring_rank(0|[1-9]\d{0,8})\.steps", re.ASCII)
_MARK = b"#msprobe step "
_HEAD = re.compile(rb"#msprobe step (\d{1,18}), (\d{1,18}) bytes\n")
_LONGEST_HEAD = 80
_FIRST_BLOCK, _BLOCK = 1 << 12, 1 << 20
_SETTLED_NS = 2_000_000_000
"""A file whose time is older than this would have another one after a write, however coarse the clock of the file system."""


def ring_file(directory: Path, rank: int) -> Path:
    """The steps of a rank in the directory of an incident."""
    return directory / f"ring_rank{rank}.steps"


def append_step(path: Path, step: int, parts: Sequence[bytes | memoryview]) -> None:
    """Add what the dump.json of a step would hold.

    Raises:
        OSError: it cannot be written; what stood there stays.
    """
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        size = sum(memoryview(part).nbytes for part in parts)
        write_all(descriptor, [b"\n%b%d, %d bytes\n" % (_MARK, step, size), *parts])
    finally:
        os.close(descriptor)


def kept_in(rings: Sequence[Ring]) -> dict[int, dict[str, Path]]:
    """Step to the names of ranks that had kept it, each with the directory that a file of its own would be in."""
    found: dict[int, dict[str, Path]] = {}
    for rank, path in rings:
        for step in steps_of(path):
            found.setdefault(step, {})[f"rank{rank}"] = path.parent / f"step{step}" / f"rank{rank}"
    return found


def rings_among(directory: Path, names: Iterable[str]) -> list[Ring]:
    """Those files of rings that are among the names in a directory, by rank."""
    return sorted((int(name[1]), directory / name[0]) for name in map(_NAME.fullmatch, names) if name)


def rings_above(step: Path) -> list[Ring]:
    """Files of rings beside the directory of a step, whether or not there is one."""
    if layout.step_of(step.name) is not None:
        with contextlib.suppress(OSError):  # nobody asked for what is above; it need not be readable
            return rings_among(step.parent, os.listdir(step.parent))
    return []


def kept_at(path: Path) -> dict[int, dict[str, Path]]:
    """The same of the path that a step or a rank in it would have as a directory of its own."""
    directory = path if layout.step_of(path.name) is not None else path.parent
    step = layout.step_of(directory.name)
    ranks = {} if step is None else kept_in(rings_above(directory)).get(step, {})
    chosen = {name: place for name, place in ranks.items() if path in (directory, place)}
    return {step: chosen} if step is not None and chosen else {}


def holders(path: Path) -> dict[str, Path]:
    """The steps and ranks of a ring, each with the ring's file: of the path that a step, a rank in it or its dump.json would have."""
    place = path.parent if path.name == layout.DUMP else path
    return {f"{step}/{name}": holder_of(one / layout.DUMP) for step, ranks in kept_at(place).items() for name, one in ranks.items()}


def steps_of(path: Path) -> dict[int, tuple[int, int]]:
    """Step to the first byte of it and the one behind it; empty where the file cannot be read."""
    try:
        found = path.stat()
        settled = time.time_ns() - found.st_mtime_ns > _SETTLED_NS
        return _settled_steps(path, found.st_ino, found.st_size, found.st_mtime_ns) if settled else _read_steps(path)
    except OSError:
        return {}


@functools.lru_cache(maxsize=1024)
def _settled_steps(path: Path, *_: int) -> dict[int, tuple[int, int]]:
    """Kept, for each of these steps is asked for by its own path."""
    return _read_steps(path)


def _read_steps(path: Path) -> dict[int, tuple[int, int]]:
    with open_input(path) as file:
        return {step: (start, stop) for step, _, start, stop in _steps(file.fileno())}


def damages_in(rings: Sequence[Ring]) -> list[str]:
    """Sentences about files of which a step may be lost with its number."""
    found: list[str] = []
    for _, path in rings:
        try:
            with open_input(path) as file:
                size = os.fstat(file.fileno()).st_size
                stray = size - sum(stop - begin for _, begin, _, stop in _steps(file.fileno()))
        except OSError as error:
            found.append(Sentence("{0}: cannot be read ({1}); check owner and mode. Its steps are left out", path, str(error.strerror)))
            continue
        if not size:
            found.append(Sentence("{0}: is empty (killed? disk full?); the steps that this rank had kept are lost", path))
        if stray:
            template = "{0}: is damaged: {1} bytes of it belong to no step that can be told, and steps may be missing"
            found.append(Sentence(template, path, f"{stray:,}"))
    return found


def open_step_file(path: Path) -> BinaryIO:
    """A file of a rank in a step for reading: the one at this path, else what the ring had kept in its place.

    Raises:
        OSError: as `open_input`.
    """
    try:
        return open_input(path)
    except (FileNotFoundError, NotADirectoryError):
        kept = _find_in_ring(path)
        if kept is None:
            raise
    return open_part(*kept)


def read_step_file(path: Path, most: int) -> bytes:
    """All that `open_step_file` opens; raises as it does, and of more than `most` bytes."""
    with open_step_file(path) as file:
        return read_opened(file, most, path)


def size_of_step_file(path: Path) -> int:
    """Bytes of what `open_step_file` opens; 0 where there is nothing."""
    if path.is_file():
        return path.stat().st_size
    kept = _find_in_ring(path)
    return 0 if kept is None else kept[2] - kept[1]


def holder_of(path: Path) -> Path:
    """The file that changes when what `open_step_file` opens does."""
    kept = None if path.exists() else _find_in_ring(path)
    return path if kept is None else kept[0]


def has_step_file(path: Path) -> bool:
    """Is there something at a path for `open_step_file`?"""
    return path.exists() or _find_in_ring(path) is not None


def _find_in_ring(path: Path) -> tuple[Path, int, int] | None:
    """Where the ring had kept what would be at a path."""
    rank, step = layout.rank_of(path.parent.name), layout.step_of(path.parent.parent.name)
    if path.name != layout.DUMP or rank is None or step is None:
        return None
    file = ring_file(path.parent.parent.parent, rank)
    place = steps_of(file).get(step)
    return None if place is None else (file, *place)


def _steps(descriptor: int) -> Iterator[tuple[int, int, int, int]]:
    """Step, where its line begins, its first byte, and the one behind it."""
    size = os.fstat(descriptor).st_size
    at = _next(descriptor, 0, size)
    while at < size:
        head = _HEAD.match(os.pread(descriptor, _LONGEST_HEAD, at))
        if head is None:
            at = _next(descriptor, at + 1, size)
            continue
        start = at + head.end()
        stop = start + int(head[2])
        if stop != size and os.pread(descriptor, len(_MARK) + 1, stop) != b"\n" + _MARK:
            stop = _next(descriptor, start, size) - 1
        yield int(head[1]), at - 1, start, stop
        at = stop + 1


def _next(descriptor: int, at: int, size: int) -> int:
    """Where the next line of a step begins, from a byte on; behind the file where there is none."""
    sought, at, length = b"\n" + _MARK, max(0, at - 1), _FIRST_BLOCK  # damaged lines may be near each other
    while at < size:
        block = os.pread(descriptor, length, at)
        place = block.find(sought)
        if place >= 0:
            return at + place + 1
        if len(block) <= len(sought):
            break
        at, length = at + len(block) - len(sought), _BLOCK
    return size + 1
