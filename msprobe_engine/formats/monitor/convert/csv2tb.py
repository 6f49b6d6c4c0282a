"""Monitor files of a run as TensorBoard event files, one directory per rank and family.

::

    {output}/rank{R}/{family}/events...        tags vp{vpp}:{name}[:micro{m}][:{phase or state}]/{statistic}, one event per step

Names and tags are those of the existing tool; phase and state stand there only where a name has several.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.output_files import make_directory
from msprobe_engine.core.io.progress import bar
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import FAMILIES
from msprobe_engine.formats.monitor.event_files import EventFile, tag_bytes
from msprobe_engine.formats.monitor.reader import Key, Table, open_run
from msprobe_engine.formats.monitor.run_layout import MONTHS

MAX_PROCESSES = 128
_log = get_logger()


class Converted(NamedTuple):
    """What `convert` made.

    Attributes:
        path: directory of the event files.
        left_out: rows, records and files that are damaged and are not in it.
    """

    path: Path
    left_out: int


def csv2tensorboard_by_step(
    monitor_path: str | Path,
    time_start: str | None = None,
    time_end: str | None = None,
    process_num: int = 1,
    data_type_list: Sequence[str] | None = None,
    output_dirpath: str | Path | None = None,
) -> Path:
    """Convert the monitor files of a run.

    Args:
        monitor_path: directory that holds the directories of the ranks.
        time_start, time_end: only directories whose time stamp (``Dec03_21-34-40``) lies between these, ends included; None: open.
            A range from December to January goes over New Year. All directories of a rank in the range are taken; where two have
            the same step, the later one counts.
        process_num: processes that convert, 1 to 128.
        data_type_list: families; None: all that there are.
        output_dirpath: where the result goes; None: ``{monitor_path}/{stamp}-csv2tensorboard_by_step``.

    Returns:
        the directory of the result

    Raises:
        UsageError: a wrong argument, or nothing to convert.
        MissingExtraError: the package tensorboard is not installed.
        SinkError: the result cannot be written.
    """
    return convert(monitor_path, time_start, time_end, process_num, data_type_list, output_dirpath).path


def convert(
    monitor_path: str | Path,
    since: str | None = None,
    until: str | None = None,
    process_num: int = 1,
    data_type_list: Sequence[str] | None = None,
    output_dirpath: str | Path | None = None,
) -> Converted:
    """`csv2tensorboard_by_step`, and how much of the files could not be converted."""
    if isinstance(process_num, bool) or not isinstance(process_num, int) or not 1 <= process_num <= MAX_PROCESSES:
        raise UsageError(f"process_num is {process_num!r}; allowed: an int from 1 to {MAX_PROCESSES}")
    if data_type_list is not None:
        if isinstance(data_type_list, str) or not all(isinstance(f, str) for f in data_type_list):
            raise UsageError(f"data_type_list is {data_type_list!r}; allowed: a list of families: {', '.join(FAMILIES)}")
        if unknown := [f for f in data_type_list if f not in FAMILIES]:
            raise UsageError(f"data_type_list: {unknown[0]!r} is no family; allowed: {', '.join(FAMILIES)}")
    run = open_run(monitor_path, since=since, until=until)
    now = time.localtime()
    stamp = f"{MONTHS[now.tm_mon - 1]}{time.strftime('%d_%H-%M-%S', now)}"
    output = Path(output_dirpath) if output_dirpath is not None else run.path / f"{stamp}-csv2tensorboard_by_step"
    make_directory(output, "csv2tensorboard_by_step")
    units = [(r, family) for r in run.ranks for family in run.families(r) if data_type_list is None or family in data_type_list]
    if not units:
        raise UsageError(f"{run.path}: has none of the families {', '.join(data_type_list or FAMILIES)}")
    tasks = [(str(monitor_path), since, until, rank, family, str(output)) for rank, family in units]
    problems, damage = run.problems, run.damage
    with bar("converting", len(tasks)) as advance:
        if process_num == 1 or len(tasks) == 1:
            for task in tasks:
                said, lost = _convert(task)
                problems |= said
                damage |= lost
                advance(f"rank {task[3]} {task[4]}")
        else:
            with ProcessPoolExecutor(min(process_num, len(tasks)), get_context("forkserver")) as pool:
                for task, (said, lost) in zip(tasks, pool.map(_convert, tasks)):
                    problems |= said
                    damage |= lost
                    advance(f"rank {task[3]} {task[4]}")
    for what, count in list(problems.items())[:10]:
        _log.warning("csv2tensorboard_by_step: not read: %s (%d)", what, count)
    _log.info("csv2tensorboard_by_step: %d tables are in %s", len(tasks), output)
    return Converted(output, sum(damage.values()))


_Task = tuple[str, str | None, str | None, int, str, str]


def _convert(task: _Task) -> tuple[dict[str, int], dict[str, int]]:
    """Convert a table of a rank; what was not read of it, and what of that is damage."""
    path, since, until, rank, family, output = task
    run = open_run(path, since=since, until=until)
    table = run.table(rank, family)
    if len(table.ids):
        directory = Path(output) / f"rank{rank}" / family
        make_directory(directory, "csv2tensorboard_by_step")
        for old in directory.glob("events.out.tfevents.*.csv2tb.*"):
            old.unlink()
        write_table(table, directory)
    return run.problems, run.damage


def write_table(table: Table, directory: Path) -> None:
    """All rows of a table as one event file in `directory`.

    Raises:
        MissingExtraError: the package tensorboard is not installed.
        SinkError: it cannot be written.
    """
    ops = list(table.values)
    tags = [[tag_bytes(f"{name}/{op}") for op in ops] for name in _names(table.keys)]
    order = np.argsort(table.steps, kind="stable")
    steps, ids = table.steps[order], table.ids[order].tolist()
    values = np.stack([table.values[op][order] for op in ops], axis=1) if ops else np.empty((len(order), 0))
    file = EventFile(directory, "csv2tb", "csv2tensorboard_by_step")
    try:
        cuts = np.flatnonzero(np.diff(steps, prepend=np.int64(-1), append=np.int64(-1)))
        for begin, end in zip(cuts.tolist(), cuts[1:].tolist()):
            file.append(int(steps[begin]), [tag for row in ids[begin:end] for tag in tags[row]], values[begin:end].ravel())
    finally:
        file.close()


def _names(keys: Sequence[Key]) -> list[str]:
    plain = [f"vp{k.vpp_stage}:{k.name}" + (f":micro{k.micro_step}" if k.micro_step >= 0 else "") for k in keys]
    first: dict[str, Key] = {}
    out = []
    for name, key in zip(plain, keys):
        more = ":".join(word for word in (key.phase, key.detail) if word)
        out.append(name if first.setdefault(name, key) == key or not more else f"{name}:{more}")
    return out
