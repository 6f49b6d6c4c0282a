"""Is the place where a probe is about to write that of an earlier run? Readers chain the launches that they find there, as of a restart."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.claims import EARLIER, EARLIER_RUN
from msprobe_engine.core.io.regular_files import DIRECTORY_MODE
from msprobe_engine.core.log import one_line
from msprobe_engine.core.process.launch import is_restart
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.find_dumps import IN_RUN, INCIDENTS
from msprobe_engine.formats.monitor.run_layout import rank_directories, read_info
from msprobe_engine.formats.pack.kind import NAME as PACK

_MARK = ".set_aside"
"""In a directory of what was set aside: its time says when the first rank came."""
_STAYS_LINKED = (
    "what another run has left in {0} stays beside what this one writes, because links are not moved: lead them elsewhere, or name "
    "another output_dir"
)
_STAYS_UNKNOWN = (
    "{0} holds incidents, or dumps of further ranks, and without a process group or WORLD_SIZE it cannot be seen whether they are of "
    "another process of this job: they stay; if they are of another run, name another output_dir"
)
_IS_THERE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def find_earlier_run(settings: ProbeSettings, rank: int) -> str:
    """A sentence for the log, empty where there is none. To be asked before the sinks begin to write.

    Args:
        settings: with the directories that this process has claimed.
    """
    sinks, root = settings.sinks, Path(settings.output_dir)
    if settings.monitor is None:
        return ""
    if sinks.csv.enabled and not sinks.csv.append_output:
        tables = Path(sinks.csv.path or os.environ.get("MONITOR_OUTPUT_DIR", "") or root / "monitor")
        if started := _last_started(tables, rank):
            return _sentence(tables if sinks.csv.path else root, started)
    files = (
        (sinks.jsonl.enabled, Path(sinks.jsonl.path or root / "jsonl")),
        (sinks.sqlite.enabled, Path(sinks.sqlite.path or root / "trend")),
    )
    for enabled, directory in files:
        if enabled and _has_files(directory, f"rank{rank}."):
            return _sentence(directory, "")
    return ""


def set_aside(settings: ProbeSettings, rank: int, world_size: int, step: int) -> list[str]:
    """Move what another run has left in the output directory into ``earlier-N`` beside it, where it is read as a run of its own: a dump
    or an incident does not say which launch it is of, so beside those of this launch it would be taken for one of them. A run that
    was started again, or goes on at a later step, keeps all. Directories that `settings` name themselves are as the existing tool has them,
    and stay.

    Each rank moves its own dumps; rank 0 also those of ranks that there are no longer, and the incidents, unless they may be of a process
    of this job that it does not know of. The configuration pack goes with the first that is moved. Nothing else of this launch is there
    yet: it has not ended a step.

    Args:
        world_size: 0: not known.
        step: the first one of this launch.

    Returns:
        Sentences for the log: what was moved, and what had to stay.
    """
    root = Path(settings.output_dir)
    if is_restart() or (settings.dump is not None and settings.dump.dump_path):
        return []
    own, others = _dumps_of(root / IN_RUN, rank, world_size)
    held = [root / IN_RUN] if own or others else []
    if not rank and not settings.incident.path and _holds_anything(root / INCIDENTS):
        held.append(root / INCIDENTS)
    begun = [*(number for number, _ in (*own, *others)), *_first_steps(root / "monitor", rank)]
    if not held or not begun or step > min(begun):
        return []
    links = [place for place in held if place.is_symlink()]
    said = [_STAYS_LINKED.format(one_line(" and ".join(map(str, links))))] if links else []
    moved = [directory for _, directory in own if root / IN_RUN not in links]
    unknown = not world_size and (others or root / INCIDENTS in held)
    if root / INCIDENTS in held and root / INCIDENTS not in links and not unknown:
        moved.append(root / INCIDENTS)
    if unknown:
        said.append(_STAYS_UNKNOWN.format(one_line(str(root))))
    if moved:
        place = _move(root, moved, alone=world_size == 1)
        said.append(f"{one_line(str(root))} holds dumps or incidents of another run; they are in {one_line(str(place))} now")
    return said


def _move(root: Path, moved: Sequence[Path], alone: bool) -> Path:
    """Where to.

    Args:
        alone: there is no other rank, which could have written a pack of this launch already. Else one that is newer than the dumps may be
            of this launch, and stays.
    """
    place = _find_place(root, moved)
    last = max(directory.stat().st_mtime_ns for directory in moved)
    for pack in (root / PACK, *root.glob(f"{Path(PACK).stem}@*.zip")):
        with contextlib.suppress(FileNotFoundError):  # another rank has moved it
            if not pack.is_symlink() and not os.path.lexists(place / pack.name) and (alone or pack.stat().st_mtime_ns <= last):
                os.rename(pack, place / pack.name)
    for directory in moved:
        target = place / directory.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(directory, target)
        if directory.parent != root:
            if (target / layout.TENSORS).is_dir():
                layout.correct_data_dir(str(directory), str(target))
            with contextlib.suppress(OSError):  # other ranks have theirs in the step
                directory.parent.rmdir()
    return place


def _dumps_of(root: Path, rank: int, world_size: int) -> tuple[list[tuple[int, Path]], list[tuple[int, Path]]]:
    """Steps and directories: of this rank's dumps, where it is rank 0 also of ranks beyond the last one; and of other ranks, where nobody
    knows how many there are. Links below `root` are left where they are: they lead to files of somebody else, or would lead elsewhere from
    another place."""
    own: list[tuple[int, Path]] = []
    others: list[tuple[int, Path]] = []
    for step in list(root.iterdir()) if root.is_dir() else ():
        number = layout.step_of(step.name)
        if number is None or not _is_own_directory(step):
            continue
        directories = [step / layout.rank_directory(rank)]
        if not rank:  # rank 0 alone lists what all have: ten thousand ranks would cost one another much
            with contextlib.suppress(FileNotFoundError):  # another rank has moved the last of it
                beyond = [each for each in step.iterdir() if (layout.rank_of(each.name) or 0) >= (world_size or 1)]
                directories += beyond if world_size else []
                others += [] if world_size else [(number, each) for each in beyond if _is_own_directory(each)]
        own += [(number, directory) for directory in directories if _is_own_directory(directory)]
    return own, others


def _is_own_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _holds_anything(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


def _first_steps(monitor: Path, rank: int) -> list[int]:
    if not monitor.is_dir():
        return []
    firsts = [read_info(each.path).get("first_step") for each in rank_directories(monitor, rank)]
    return [first for first in firsts if isinstance(first, int)]


def _find_place(root: Path, moved: Sequence[Path]) -> Path:
    """The same directory for all ranks, which look on their own: one that was made since the last of it was written; of several the
    oldest. Who finds none makes one. Other names are left alone, whoever has put them there."""
    last = max(directory.stat().st_mtime_ns for directory in moved)
    while True:
        names = set(os.listdir(root))
        places = [root / name for name in names if EARLIER_RUN.fullmatch(name)]
        since = [(made, place) for place in places if (made := _read_mark_time(place)) >= last and not _holds(place, root, moved)]
        if since:
            return min(since)[1]
        place = root / next(name for number in itertools.count(1) if (name := EARLIER.format(number)) not in names)
        if _make_directory(place):
            return place


def _read_mark_time(place: Path) -> int:
    """When; 0 of what no rank has made."""
    if not _is_own_directory(place) or (place / IN_RUN).is_symlink():
        return 0
    try:
        return (place / _MARK).lstat().st_mtime_ns
    except OSError:
        return 0


def _make_directory(place: Path) -> bool:
    """With its mark from the first moment on; False: another rank was faster."""
    draft = place.with_name(f".{uuid.uuid4().hex}")
    draft.mkdir(DIRECTORY_MODE)
    (draft / _MARK).touch()
    try:
        os.rename(draft, place)
    except OSError as error:
        (draft / _MARK).unlink()
        draft.rmdir()
        if error.errno not in _IS_THERE:
            raise
        return False
    return True


def _holds(place: Path, root: Path, moved: Sequence[Path]) -> bool:
    return any(os.path.lexists(place / directory.relative_to(root)) for directory in moved)


def _sentence(where: Path, started: str) -> str:
    since = f" (started {one_line(started)})" if started else ""
    return (
        f"{one_line(str(where))} holds another run already{since}: where this one begins at a later step, readers take both for one run "
        "that went on, and of a step that both have the numbers of this one; else they read this one alone. If it is no continuation, "
        "name another output_dir"
    )


def _last_started(directory: Path, rank: int) -> str:
    if not directory.is_dir():
        return ""
    try:
        directories = rank_directories(directory, rank)
    except UsageError:  # a directory that cannot be listed is said by who writes there
        return ""
    return str(read_info(directories[-1].path).get("started") or directories[-1].stamp or "at an unknown time") if directories else ""


def _has_files(directory: Path, prefix: str) -> bool:
    try:
        return any(name.startswith(prefix) for name in os.listdir(directory))
    except OSError:
        return False
