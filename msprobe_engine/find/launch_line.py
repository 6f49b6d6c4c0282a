"""Commands that begin a training again: with the launch line of the run, where its pack has it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.process.variables import LAUNCH_LINE

UNKNOWN = "LAUNCH LINE"
"""Stands in a command for a launch line that is not known."""
GOLDEN = "LAUNCH LINE OF GOLDEN"


def again_alone(options: str) -> list[str]:
    """The training once more with these options, and its diagnosis. The place is named: ``latest`` moves with every launch."""
    place, _ = new_places()
    return [f"msprobe run {options} --output-dir {place} -- {UNKNOWN}", f"msprobe diagnose {place}"]


def again_both(options: str) -> list[str]:
    """Both trainings once more with these options, and the comparison. The golden one comes first: the end of the second names it."""
    target_place, golden_place = new_places()
    both = ((golden_place, GOLDEN), (target_place, UNKNOWN))
    return [
        *(f"msprobe run {options} --output-dir {place} -- {line}" for place, line in both),
        f"msprobe diagnose {target_place} {golden_place}",
    ]


def new_places() -> tuple[str, str]:
    """Names for the output directories of both trainings that nothing in the working directory has: one of them may be what was just
    compared."""
    for number in itertools.count(1):
        ending = f"_{number}" if number > 1 else ""
        names = f"again{ending}", f"again_golden{ending}"
        if not any(map(os.path.lexists, names)):
            break
    return names


def with_launch_lines(commands: Sequence[str], target: Path | None, golden: Path | None) -> list[str]:
    """The commands with the launch lines of the runs.

    Args:
        target, golden: packs of the runs, None: there is none.
    """
    if not any(UNKNOWN in command for command in commands):
        return list(commands)
    target_line, golden_line = _launch_line(target) or UNKNOWN, _launch_line(golden) or GOLDEN
    return [golden_line.join(part.replace(UNKNOWN, target_line) for part in command.split(GOLDEN)) for command in commands]


def _launch_line(pack: Path | None) -> str:
    """What stood behind ``msprobe run --``, without its secrets; "" where the pack does not say. Its words are quoted anew: nothing of a
    file becomes more than words."""
    if pack is None:
        return ""
    with contextlib.suppress(DumpFormatError, ValueError):
        read = read_pack(pack)
        line = read.mapping(next(iter(read.by_rank("env").values()), "")).get(LAUNCH_LINE)
        return shlex.join(shlex.split(line)) if isinstance(line, str) else ""
    return ""
