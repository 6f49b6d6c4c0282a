"""Which ranks a run has, in the header of every dump.json: without it a dump from which a rank is missing looks like a whole one of fewer
ranks. Keys that readers of the existing format ignore:

* ``rank``: that of the process;
* ``world_size``: number of ranks of the job;
* ``dumped_ranks``: those that the settings have chosen; absent: all.

A process without a rank, or with one that was given to it by hand, writes none of them, nor does a dump that keeps only what is found (a
rank without a finding has no file there).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msprobe_engine.core.errors import TextError
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.formats.dump import layout

_HEAD_BYTES = 1 << 14
"""Of a file, in which these keys stand when it has them: in front of them are paths at most."""
_MOST = 1 << 20
"""Ranks of a job; a larger number is damage."""
_WORLD = re.compile(rb'"world_size": *([0-9]{1,7})\b')
_CHOSEN = re.compile(rb'"dumped_ranks": *\[([0-9, \n]*)\]')
_LOST = re.compile(rb'"lost": *(\{[^{}]{0,8192}\})')
_DATA = re.compile(rb'"data": *\{')


def of_process(rank: int | None, world_size: int, chosen: Sequence[int]) -> Mapping[str, object]:
    """The keys of this process; none where its rank is not known or is none of the job's."""
    if rank is None or not 0 <= rank < world_size:
        return {}
    found: dict[str, object] = {"rank": rank, "world_size": world_size}
    return found | ({"dumped_ranks": sorted(set(chosen))} if chosen else {})


def expected_ranks(directory: Path) -> frozenset[int]:
    """Ranks that the file of a rank directory says there are dumps of; none where it does not say any."""
    head = _head(directory / layout.DUMP) or _head(directory / layout.DEBUG)
    world = _WORLD.search(head)
    if world is None or int(world[1]) > _MOST:
        return frozenset()
    chosen = _CHOSEN.search(head)
    named = {int(text) for text in chosen[1].split(b",") if text.strip()} if chosen else None
    return frozenset(rank for rank in range(int(world[1])) if named is None or rank in named)


def lost_parts(directory: Path) -> Mapping[str, object]:
    """What the file of a rank directory says that the run could not keep, reason to count."""
    head = _head(directory / layout.DUMP) or _head(directory / layout.DEBUG)
    if b'"lost":' not in head:
        return {}
    found = _LOST.search(head)
    try:
        document = parse_json(head[found.start(1) : found.end(1)]) if found else None
    except TextError:
        document = None
    return document if isinstance(document, dict) else {"what stands there cannot be read": 1}


def _head(file: Path) -> bytes:
    """The beginning of a file up to its records, empty where it cannot be read."""
    try:
        with open_input(file) as stream:
            return _DATA.split(stream.read(_HEAD_BYTES), maxsplit=1)[0]
    except OSError:
        return b""
