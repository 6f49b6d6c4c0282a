"""Where dumps lie: which directories are a dump, and of a run's output directory which of those in it. Names are looked at, no file is
read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import guard_opening
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.ring_file import Ring, has_step_file, kept_at, kept_in, rings_above, rings_among

Found = dict[int | None, dict[str, Path | None]]
"""Step to ranks by their names, and the directory of each; None in place of a directory that holds no dump, and of a step that its
directory does not say."""
Entries = Sequence[os.DirEntry[str]]
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


class FoundDump(NamedTuple):
    """The root of a dump and what is in it. rings: files of rings in it or beside it; strays: what lies beside ranks and is none;
    entries: what is in the root."""

    root: Path
    ranks: Found
    rings: list[Ring]
    strays: list[str]
    entries: Entries = ()


def find_dump(path: Path, entries: Entries | None = None) -> FoundDump | None:
    """The dump that is meant by a directory: the directory itself, or the dump in it when it is the output directory of a run. None where
    neither is a dump.

    Args:
        entries: what is in the directory, where that was listed before.

    Raises:
        DumpFormatError: a directory cannot be listed.
    """
    for place in (path, path / IN_RUN):
        if place.is_dir():
            found = _find_ranks(place, entries if place is path else None)
            if any(directory is not None for ranks in found.ranks.values() for directory in ranks.values()):
                return found
    kept = kept_at(path)
    return FoundDump(path, {step: dict(ranks) for step, ranks in kept.items()}, rings_above(path), []) if kept else None


def holds_dump(path: Path) -> bool:
    """Is this a path of a dump: its root, the directory of a step or a rank, or a dump.json? Not the output directory of its run."""
    directory = path
    if path.name in (layout.DUMP, layout.DEBUG) and not path.is_dir():
        if not has_step_file(path):
            return False
        directory = path.parent
    with contextlib.suppress(DumpFormatError):
        found = find_dump(directory)
        return found is not None and found.root == directory
    return False


def describe_content(path: Path) -> str:
    """For the message of a directory without a dump: its directories, and which of them to give instead."""
    children = sorted(_children(path))
    if any(p.name == "monitor" for p in children):
        return (
            "monitor output: this run was watched and not dumped "
            "(msprobe trends and diagnose read it; msprobe run --preset dump makes a dump)"
        )
    return f"directories: {', '.join(p.name for p in children[:8]) or 'nothing'}{_below(children)}"


def _find_ranks(path: Path, entries: Entries | None) -> FoundDump:
    found: Found = {}
    rings, strays = rings_above(path), list[str]()
    if _has_dump(path):
        step = layout.step_of(path.resolve().parent.name)
        found[step] = {path.resolve().name if not layout.is_rank_directory(path.name) else path.name: path}
        return FoundDump(path, found, rings, strays)
    listed = entries_of(path) if entries is None else entries
    directories = _directories(listed)
    if ranks := _ranks(directories):
        step = layout.step_of(path.resolve().name)
        found[step] = _with_kept(ranks, kept_in(rings).get(step or 0, {}))
        strays += [] if step is None else _strays(listed)
    else:
        for name, child in directories.items():
            if (step := layout.step_of(name)) is not None:
                inside = [] if child is None else entries_of(child)
                found[step] = {name: None} if child is None else _ranks(_directories(inside))
                strays += _strays(inside)
        rings = rings_among(path, (entry.name for entry in listed))
        for step, kept in kept_in(rings).items():
            found[step] = _with_kept(found.get(step, {}), kept)
    return FoundDump(path, {step: ranks for step, ranks in found.items() if ranks}, rings, strays, listed)


def _strays(entries: Entries) -> list[str]:
    return [entry.name for entry in entries if not layout.is_rank_directory(entry.name)]


def _with_kept(ranks: Mapping[str, Path | None], kept: Mapping[str, Path]) -> dict[str, Path | None]:
    """A directory without a dump takes nothing away from what the ring had kept."""
    return {**ranks, **kept, **{name: place for name, place in ranks.items() if place is not None}}


def _below(children: Sequence[Path]) -> str:
    """For the message of a directory without a dump: which of those in it, or output directories in it, have one."""
    found: list[str] = []
    inside = [child for one in children if one.name == INCIDENTS for child in sorted(_children(one))]
    for child in [*children, *inside][:_LOOKED_INTO]:
        with contextlib.suppress(DumpFormatError):  # one that must not be listed
            found += [str(dump.root) for dump in [find_dump(child)] if dump is not None]
    if len(found) == 1:
        return f"; give {found[0]}"
    return f"; give one of them: {', '.join(found[:3])}" if found else ""


def entries_of(path: Path) -> Entries:
    """What is in a directory, by name.

    Raises:
        DumpFormatError: it cannot be listed.
    """
    with guard_opening(path):
        return sorted(os.scandir(path), key=lambda entry: entry.name)


def _directories(entries: Iterable[os.DirEntry[str]]) -> dict[str, Path | None]:
    """The directories among them by their names, None in place of a link to nothing."""
    return {
        entry.name: Path(entry.path) if os.path.isdir(entry.path) else None  # False, too, of a link to itself
        for entry in entries
        if os.path.isdir(entry.path) or (entry.is_symlink() and not os.path.exists(entry.path))
    }


def _children(path: Path) -> list[Path]:
    return [child for child in _directories(entries_of(path)).values() if child is not None]


def _has_dump(path: Path) -> bool:
    return any((path / name).exists() for name in (layout.DUMP, layout.DEBUG, layout.FRAME_LOG, layout.MARKER))


def _ranks(listing: Mapping[str, Path | None]) -> dict[str, Path | None]:
    ranks = {name: child for name, child in listing.items() if layout.is_rank_directory(name)}
    return {name: child if child is not None and _has_dump(child) else None for name, child in ranks.items()}
