"""Where dumps lie: which directories are a dump, and of a run's output directory which of those in it. Names are looked at, no file is
read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import guard_opening
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.ring_file import has_step_file, kept_at, ranks_in

Found = dict[int | None, dict[str, Path | None]]
"""Step to ranks by their names, and the directory of each; None in place of a directory that holds no dump, and of a step that its
directory does not say."""
IN_RUN = "dump"
"""The directory of the dump in the output directory of a run."""
INCIDENTS = "incidents"
_LOOKED_INTO = 64
"""Directories looked into where there is no dump, to say which of them has one."""


def nearby(path: Path) -> str:
    """For the message of a path that is not there: where a dump lies instead (``step0/proc123/dump.json`` for ``step0/rank0/dump.json``);
    empty where there is none."""
    one = path.suffix == ".json"
    step = path.parent.parent if one else path.parent
    try:
        found = sorted(step.glob(f"*/{layout.DUMP}"))[:3]
    except OSError:
        return ""
    if not found:
        return ""
    places = ", ".join(str(each if one else each.parent) for each in found)
    return f"; there is {places}"


def find_dump(path: Path) -> tuple[Path, Found] | None:
    """The root of the dump that is meant by a directory, and what is in it (`find_ranks`): the directory itself, or the dump in it when it
    is the output directory of a run. None where neither is a dump.

    Raises:
        DumpFormatError: a directory cannot be listed.
    """
    for place in (path, path / IN_RUN):
        if place.is_dir():
            found = find_ranks(place)
            if any(directory is not None for ranks in found.values() for directory in ranks.values()):
                return place, found
    kept = kept_at(path)
    return (path, {step: dict(ranks) for step, ranks in kept.items()}) if kept else None


def holds_dump(path: Path) -> bool:
    """Is this a path of a dump: its root, the directory of a step or a rank, or a dump.json? Not the output directory of its run."""
    directory = path
    if path.name in (layout.DUMP, layout.DEBUG) and not path.is_dir():
        if not has_step_file(path):
            return False
        directory = path.parent
    with contextlib.suppress(DumpFormatError):
        found = find_dump(directory)
        return found is not None and found[0] == directory
    return False


def describe_content(path: Path) -> str:
    """For the message of a directory without a dump: its directories, and which of them to give instead."""
    children = sorted(_children(path))
    return f"directories: {', '.join(p.name for p in children[:8]) or 'nothing'}{_below(children)}"


def find_ranks(path: Path) -> Found:
    """The steps and ranks in a directory; empty when it has none.

    Raises:
        DumpFormatError: a directory cannot be listed.
    """
    found: Found = {}
    if _has_dump(path):
        step = layout.step_of(path.resolve().parent.name)
        found[step] = {path.resolve().name if not layout.is_rank_directory(path.name) else path.name: path}
    elif ranks := _ranks(listing := _listing(path)):
        step = layout.step_of(path.resolve().name)
        found[step] = _with_kept(ranks, kept_at(path).get(step or 0, {}))
    else:
        for name, child in listing.items():
            if (step := layout.step_of(name)) is not None:
                found[step] = {name: None} if child is None else _ranks(_listing(child))
        for step, kept in ranks_in(path).items():
            found[step] = _with_kept(found.get(step, {}), kept)
    return {step: ranks for step, ranks in found.items() if ranks}


def _with_kept(ranks: Mapping[str, Path | None], kept: Mapping[str, Path]) -> dict[str, Path | None]:
    """A directory without a dump takes nothing away from what the ring had kept."""
    return {**ranks, **kept, **{name: place for name, place in ranks.items() if place is not None}}


def _below(children: Sequence[Path]) -> str:
    """For the message of a directory without a dump: which of those in it, or output directories in it, have one."""
    found: list[str] = []
    inside = [child for one in children if one.name == INCIDENTS for child in sorted(_children(one))]
    for child in [*children, *inside][:_LOOKED_INTO]:
        with contextlib.suppress(DumpFormatError):  # one that must not be listed
            found += [str(dump[0]) for dump in [find_dump(child)] if dump is not None]
    if len(found) == 1:
        return f"; give {found[0]}"
    return f"; give one of them: {', '.join(found[:3])}" if found else ""


def _listing(path: Path) -> dict[str, Path | None]:
    """The directories in a directory by their names, None in place of a link to nothing."""
    with guard_opening(path):
        return {
            entry.name: Path(entry.path) if os.path.isdir(entry.path) else None  # False, too, of a link to itself
            for entry in os.scandir(path)
            if os.path.isdir(entry.path) or (entry.is_symlink() and not os.path.exists(entry.path))
        }


def _children(path: Path) -> list[Path]:
    return [child for child in _listing(path).values() if child is not None]


def _has_dump(path: Path) -> bool:
    return any((path / name).exists() for name in (layout.DUMP, layout.DEBUG, layout.FRAME_LOG, layout.MARKER))


def _ranks(listing: Mapping[str, Path | None]) -> dict[str, Path | None]:
    ranks = {name: child for name, child in listing.items() if layout.is_rank_directory(name)}
    return {name: child if child is not None and _has_dump(child) else None for name, child in ranks.items()}
