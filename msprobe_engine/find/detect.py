"""What `diagnose` was pointed at: a dump, an incident, monitor output, a pack of configurations or a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.log import one_line
from msprobe_engine.formats.checkpoint.open import locate, reader_of
from msprobe_engine.formats.dump.find_dumps import find_dump, holds_dump
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.formats.pack.kind import is_pack

DUMP, INCIDENT, MONITOR, CONFIG, CHECKPOINT, NOTHING = (
    "dump",
    "incident",
    "monitor output",
    "pack of configurations",
    "checkpoint",
    "nothing",
)
LATEST = "latest"
"""The link that `msprobe run` leaves to the last launch that trained."""
_LOOKED_INTO, _SHOWN = 64, 4
_TRACKER = "latest_checkpointed_iteration.txt"
_SAMPLES = re.compile(r"samples_rank\d{1,9}\.jsonl")


def kind_of(path: Path) -> str:
    """One of `DUMP`, `INCIDENT`, `MONITOR`, `CONFIG`, `CHECKPOINT` and `NOTHING`, the first that fits.

    Raises:
        DumpFormatError: there is no such path.
    """
    if not path.exists() and not holds_dump(path):
        raise DumpFormatError(f"{path}: there is no such file or directory; give a dump, an incident directory or monitor output")
    if path.is_dir() and ((path / "incident.json").is_file() or any(_SAMPLES.fullmatch(entry.name) for entry in path.iterdir())):
        return INCIDENT
    if holds_dump(path):
        return DUMP
    if is_monitored(path):
        return MONITOR
    if path.is_file() and is_pack(path):
        return CONFIG
    return CHECKPOINT if _is_checkpoint(path) else NOTHING


def _is_checkpoint(path: Path) -> bool:
    if (path / _TRACKER).is_file():
        return True  # also where what it names is not there: its reader says so
    try:
        chosen, _ = locate(path)
        reader_of(chosen)
    except DumpFormatError:
        return False
    return True


def is_monitored(path: Path) -> bool:
    """Has a monitor written here?"""
    try:
        open_run(path)
    except UsageError:
        return False
    return True


def refuse(path: Path, kind: str) -> UsageError:
    """The sentence for what `diagnose` does not look at."""
    if kind == CHECKPOINT:
        return UsageError(f"{path}: is a checkpoint; give a second one to compare it with (msprobe ckpt show says what it holds)")
    if runs := _runs_below(path):
        more = f", ... ({len(runs)} in all)" if len(runs) > _SHOWN else ""
        return UsageError(
            f"{path}: holds runs in directories of their own; give one of them: {', '.join(map(one_line, runs[:_SHOWN]))}{more}"
        )
    return UsageError(
        f"{path}: holds no dump, incident, monitor output, pack of configurations or checkpoint; give the directory that one of them was "
        "written to (msprobe show lists them)"
    )


def _runs_below(path: Path) -> list[str]:
    """Output directories of launches in a directory, the last one that trained first."""
    try:
        children = sorted((child for child in path.iterdir() if child.is_dir()), reverse=True)[:_LOOKED_INTO]
    except OSError:
        return []
    runs = [str(child) for child in children if is_monitored(child) or _dumped(child)]
    latest = str(path / LATEST)
    return [latest, *(run for run in runs if run != latest)] if latest in runs else runs


def _dumped(path: Path) -> bool:
    try:
        return find_dump(path) is not None
    except DumpFormatError:
        return False


def common(target: Path, golden: Path | None) -> str:
    """`DUMP`, `MONITOR`, `CONFIG` or `CHECKPOINT`: what both are; an incident directory holds dumps, and counts as one.

    Raises:
        DumpFormatError: there is no such path.
        UsageError: it is something else, or the two are of different kinds.
    """
    found = []
    for path in (target,) if golden is None else (target, golden):
        kind = kind_of(path)
        if kind == NOTHING or (kind == CHECKPOINT and golden is None):
            raise refuse(path, kind)
        found.append(DUMP if kind == INCIDENT else kind)
    if len(set(found)) > 1:
        raise UsageError(f"{target} is a {found[0]} and {golden} a {found[1]}: nothing of one kind can be compared; give two of one kind")
    return found[0]
