"""What `diagnose` was pointed at: a dump, an incident, monitor output, a pack of configurations or a checkpoint."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from msprobe_engine.dump.reader import open_dump
from msprobe_engine.errors import DumpFormatError, UsageError
from msprobe_engine.monitor.reader import open_run

DUMP, INCIDENT, MONITOR, CONFIG, CHECKPOINT, NOTHING = (
    "dump",
    "incident",
    "monitor output",
    "pack of configurations",
    "checkpoint",
    "nothing",
)
_SAMPLES = re.compile(r"samples_rank\d{1,9}\.jsonl")
_CHECKPOINT_FILES = (
    "latest_checkpointed_iteration.txt",
    "latest",
    "common.pt",
    "metadata.json",
    ".metadata",
    "model.safetensors.index.json",
)
_CHECKPOINT_SUFFIXES = (".distcp", ".safetensors", ".ckpt", ".pth")


def kind_of(path: Path) -> str:
    """One of `DUMP`, `INCIDENT`, `MONITOR`, `CONFIG`, `CHECKPOINT` and `NOTHING`, the first that fits.

    Raises:
        DumpFormatError: there is no such path.
    """
    if not path.exists():
        raise DumpFormatError(f"{path}: there is no such file or directory; give a dump, an incident directory or monitor output")
    if path.is_dir() and ((path / "incident.json").is_file() or any(_SAMPLES.fullmatch(entry.name) for entry in path.iterdir())):
        return INCIDENT
    if _opens(open_dump, path, DumpFormatError):
        return DUMP
    if _opens(open_run, path, UsageError):
        return MONITOR
    if path.is_file():
        if zipfile.is_zipfile(path) and path.suffix in (".zip", ""):
            return CONFIG
        return CHECKPOINT if path.suffix in (*_CHECKPOINT_SUFFIXES, ".pt") else NOTHING
    names = [entry.name for entry in path.iterdir()]
    if any(name in _CHECKPOINT_FILES or name.endswith(_CHECKPOINT_SUFFIXES) for name in names):
        return CHECKPOINT
    return NOTHING


def _opens(opener: object, path: Path, refusal: type[Exception]) -> bool:
    try:
        opener(path)  # type: ignore[operator]
    except refusal:
        return False
    return True


def refuse(path: Path, kind: str) -> UsageError:
    """The sentence for what `diagnose` does not look at."""
    if kind in (CONFIG, CHECKPOINT):
        return UsageError(f"{path}: is a {kind}; diagnose compares dumps, incident directories and monitor output, not yet these")
    return UsageError(
        f"{path}: holds no dump, incident or monitor output; give the directory that one of them was written to (msprobe show lists them)"
    )


def common(target: Path, golden: Path | None) -> str:
    """`DUMP` or `MONITOR`: what both are; an incident directory holds dumps, and counts as one.

    Raises:
        DumpFormatError: there is no such path.
        UsageError: it is something else, or the two are of different kinds.
    """
    found = []
    for path in (target,) if golden is None else (target, golden):
        kind = kind_of(path)
        if kind not in (DUMP, INCIDENT, MONITOR):
            raise refuse(path, kind)
        found.append(MONITOR if kind == MONITOR else DUMP)
    if len(set(found)) > 1:
        raise UsageError(f"{target} is a {found[0]} and {golden} a {found[1]}: nothing of one kind can be compared; give two of one kind")
    return found[0]
