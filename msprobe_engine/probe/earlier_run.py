"""Is the place where a probe is about to write that of an earlier run? Readers chain the launches that they find there, as of a restart."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.claims import EARLIER, EARLIER_RUN
from msprobe_engine.core.log import one_line
from msprobe_engine.core.process.launch import is_restart
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.find_dumps import IN_RUN, INCIDENTS
from msprobe_engine.formats.monitor.run_layout import rank_directories, read_info


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


def set_aside(settings: ProbeSettings, rank: int, world_size: int, step: int) -> str:
    """Move what another run has left in the output directory into ``earlier-N`` beside it, where it is read as a run of its own: a dump
    or an incident does not say which launch it is of, so beside those of this launch it would be taken for one of them. A run that
    was started again, or goes on at a later step, keeps all. Directories that `settings` name themselves are as the existing tool has them,
    and stay.

    Each rank moves its own dumps; rank 0 also those of ranks that there are no longer, and the incidents. Nothing of this launch is there
    yet: it has not ended a step.

    Args:
        world_size: 0: not known.
        step: the first one of this launch.

    Returns:
        A sentence for the log; empty where nothing was moved.
    """
    root = Path(settings.output_dir)
    if is_restart() or (settings.dump is not None and settings.dump.dump_path):
        return ""
    dumps = list(_dumps_of(root / IN_RUN, rank, world_size))
    own = [found for found, directory in dumps if layout.rank_of(directory.name) == rank]
    begun = [*own, *_first_steps(root / "monitor", rank)]
    if not begun or step > min(begun):
        return ""
    moved = [directory for _, directory in dumps]
    if not rank and not settings.incident.path and (root / INCIDENTS).is_dir():
        moved.append(root / INCIDENTS)
    if not moved:
        return ""
    taken = [int(m[1]) for name in os.listdir(root) if (m := EARLIER_RUN.fullmatch(name)) and _holds(root / name, moved)]
    place = root / EARLIER.format(1 + max(taken, default=0))
    for directory in moved:
        target = place / directory.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(directory, target)
        if directory.parent != root:
            if (target / layout.TENSORS).is_dir():
                layout.correct_data_dir(str(directory), str(target))
            with contextlib.suppress(OSError):  # other ranks have theirs in the step
                directory.parent.rmdir()
    return f"{one_line(str(root))} holds dumps or incidents of another run; they are in {one_line(str(place))} now"


def _dumps_of(root: Path, rank: int, world_size: int) -> Iterator[tuple[int, Path]]:
    """Steps and directories of this rank's dumps; of rank 0 also of ranks beyond the last one."""
    if not root.is_dir() or root.is_symlink():
        return
    for step in list(root.iterdir()):
        number = layout.step_of(step.name)
        directories: list[Path] = []
        if number is None or step.is_symlink():
            continue
        with contextlib.suppress(FileNotFoundError):  # another rank has moved the last of it
            directories = list(step.iterdir())
        for directory in directories:
            of = layout.rank_of(directory.name)
            if of == rank or (not rank and world_size and of is not None and of >= world_size):
                yield number, directory


def _first_steps(monitor: Path, rank: int) -> list[int]:
    if not monitor.is_dir():
        return []
    firsts = [read_info(each.path).get("first_step") for each in rank_directories(monitor) if each.rank == rank]
    return [first for first in firsts if isinstance(first, int)]


def _holds(place: Path, moved: list[Path]) -> bool:
    """Does a directory of an earlier run have a dump of one of these ranks, or incidents, already? Ranks look on their own, and come to
    the same number."""
    names = {directory.name for directory in moved}
    return any((place / name).exists() or any((place / IN_RUN).glob(f"step*/{name}")) for name in names)


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
        mine = [each for each in rank_directories(directory) if each.rank == rank]
    except UsageError:  # a directory that cannot be listed is said by who writes there
        return ""
    return str(read_info(mine[-1].path).get("started") or mine[-1].stamp or "at an unknown time") if mine else ""


def _has_files(directory: Path, prefix: str) -> bool:
    try:
        return any(name.startswith(prefix) for name in os.listdir(directory))
    except OSError:
        return False
