"""Of which run a dump.json is and which ranks that has, in its header: without it a dump from which a rank is missing looks like a whole
one of fewer ranks, and what two runs have written into one directory like one run. Keys that readers of the existing format ignore:

* ``rank``: that of the process;
* ``world_size``: number of ranks of the job;
* ``dumped_ranks``: those that the settings have chosen; absent: all;
* ``run_began``: when the process began to be watched, in seconds since 1970;
* ``step_ended``: when it ended the step.

A process without a rank writes the times alone, one whose rank was given to it by hand none of them. A dump that keeps only what is found
does not say which ranks there are (a rank without a finding has no file there).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core.errors import DumpFormatError, TextError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.frame_log import decode
from msprobe_engine.formats.dump.ring_file import open_step_file

_HEAD_BYTES = 1 << 14
"""Of a file, in which these keys stand when it has them: in front of them are paths at most."""
_MOST = 1 << 20
"""Ranks of a job; a larger number is damage."""
_LARGEST_LOG = 1 << 30
_WORLD = re.compile(rb'"world_size": *([0-9]{1,7})\b')
_CHOSEN = re.compile(rb'"dumped_ranks": *\[([0-9, \n]*)\]')
_LOST = re.compile(rb'"lost": *(\{[^{}]{0,8192}\})')
_DATA = re.compile(rb'"data": *\{')
_TIMES = re.compile(rb'"run_began": *([0-9]{1,12}(?:\.[0-9]{1,9})?),\s*"step_ended": *([0-9]{1,12}(?:\.[0-9]{1,9})?)\b')


def parallel_of(header: Mapping[str, Any], part: str) -> dict[str, int]:
    """Axis of the parallel layout to the place of the rank (`part` ``rank``) or the number of ranks (``size``); empty where the header of
    the dump does not say it."""
    parallel = header.get("parallel")
    told = parallel.get(part) if isinstance(parallel, Mapping) else None
    return {str(axis): value for axis, value in told.items() if type(value) is int} if isinstance(told, Mapping) else {}


class Times(NamedTuple):
    """When a process began to be watched, and when it ended a step; in seconds since 1970."""

    began: float
    ended: float


def of_process(rank: int | None, world_size: int, chosen: Sequence[int]) -> Mapping[str, object]:
    """The keys of this process; none where its rank is not known or is none of the job's."""
    if rank is None or not 0 <= rank < world_size:
        return {}
    found: dict[str, object] = {"rank": rank, "world_size": world_size}
    return found | ({"dumped_ranks": sorted(set(chosen))} if chosen else {})


class Head:
    """What the file of a rank directory (dump.json, else debug.json) says in front of its records."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._text = _read_head(directory / layout.DUMP) or _read_head(directory / layout.DEBUG)

    @cached_property
    def times(self) -> Times | None:
        """None where it does not say them. Of a process that was killed they stand in its whole log."""
        found = _TIMES.search(self._text or _read_head_of_log(self._directory / layout.FRAME_LOG))
        return None if found is None else Times(float(found[1]), float(found[2]))

    def expected_ranks(self) -> frozenset[int]:
        """Ranks that it says there are dumps of; none where it does not say any."""
        world = _WORLD.search(self._text)
        if world is None or int(world[1]) > _MOST:
            return frozenset()
        chosen = _CHOSEN.search(self._text)
        named = {int(text) for text in chosen[1].split(b",") if text.strip()} if chosen else None
        return frozenset(rank for rank in range(int(world[1])) if named is None or rank in named)

    def lost_parts(self) -> Mapping[str, object]:
        """What it says that the run could not keep, reason to count."""
        if b'"lost":' not in self._text:
            return {}
        found = _LOST.search(self._text)
        try:
            document = parse_json(self._text[found.start(1) : found.end(1)]) if found else None
        except TextError:
            document = None
        return document if isinstance(document, dict) else {"what stands there cannot be read": 1}


def _read_head_of_log(file: Path) -> bytes:
    """What a killed process has left in place of dump.json, empty where it cannot be read."""
    try:
        return decode(read_input(file, _LARGEST_LOG), str(file)).head
    except (OSError, DumpFormatError):
        return b""


def _read_head(file: Path) -> bytes:
    """The beginning of a file up to its records, empty where it cannot be read."""
    try:
        with open_step_file(file) as stream:
            return _DATA.split(stream.read(_HEAD_BYTES), maxsplit=1)[0]
    except OSError:
        return b""
