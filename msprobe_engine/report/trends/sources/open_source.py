"""What there is of a run, as sources of curves: files of a monitor, trend data bases, dumps."""

from __future__ import annotations

from pathlib import Path

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.report.trends.sources.dumps import DumpSource
from msprobe_engine.report.trends.sources.monitored import MonitorSource
from msprobe_engine.report.trends.sources.source import Both, Source, Wanted, format_problems


def open_source(path: Path | str, wanted: Wanted | None = None, scheduler: str = "") -> Source:
    """What there is of a run: files of the monitor (all formats), trend data bases, dumps of one or more steps, or several of these.

    Args:
        path: output directory, its ``monitor`` or ``dump`` directory, a directory of one rank, a ``.jsonl`` or ``.db`` file, a dump.
        scheduler: address of a Dask scheduler (``tcp://host:8786``) whose workers read dumps; "": they are read here.

    Raises:
        UsageError: there is nothing of the kind, or no rank of it is wanted.
    """
    wanted = wanted or Wanted()
    root = Path(path)
    sources: list[Source] = []
    reasons: list[str] = []
    try:
        sources.append(open_monitor(root, wanted))
    except UsageError as error:
        reasons.append(str(error))
    if root.is_dir() or root.suffix == ".json":
        try:
            sources.append(DumpSource(open_dump(root), wanted, root, scheduler))
        except (DumpFormatError, UsageError) as error:
            reasons.append(str(error))
    if not sources:
        raise UsageError(f"{root}: holds no files of a monitor, no trend data base and no dump. {' '.join(reasons)}")
    joined = sources[0] if len(sources) == 1 else Both(root, sources)
    if not joined.ranks:
        if joined.problems:
            raise UsageError(f"{root}: no rank of it can be read{format_problems(joined.problems)}")
        raise UsageError(f"{root}: has none of the ranks asked for" if wanted.ranks else f"{root}: no rank has written a number")
    return joined


def open_monitor(path: Path | str, wanted: Wanted) -> Source:
    """The files of the monitor alone.

    Raises:
        UsageError: there are none, or a time stamp is none.
    """
    return MonitorSource(open_run(path, since=wanted.since, until=wanted.until), wanted)
