"""Is the place where a probe is about to write that of an earlier run? Readers chain the launches that they find there, as of a restart."""

from __future__ import annotations

import os
from pathlib import Path

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import one_line
from msprobe_engine.core.settings.schema import ProbeSettings
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
