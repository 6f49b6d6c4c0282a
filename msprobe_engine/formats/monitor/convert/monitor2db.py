"""What a run has written, monitor files and dumps, as trend data bases: `msprobe_engine.formats.monitor.trend_db`.

A conversion can be stopped and started again: what is in the data base already is left out, what has grown since is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.errors import UnreadableFileError, UsageError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import guard_writing
from msprobe_engine.core.io.progress import bar
from msprobe_engine.core.io.regular_files import OddFileError, make_directories
from msprobe_engine.core.io.sqlite_file import open_database as read_database
from msprobe_engine.formats.monitor.reader import Run, Table, open_run
from msprobe_engine.formats.monitor.reader_csv import families_of
from msprobe_engine.formats.monitor.run_layout import scan
from msprobe_engine.formats.monitor.trend_db import TrendDatabase, json_text

MONITOR_DB, DUMP_DB = "monitor_data.trend.db", "dump_data.trend.db"
MAX_PROCESSES = 128
MOST_MAPPING_BYTES = 64 << 20


@dataclass
class Imported:
    """What one conversion has done.

    Attributes:
        units: pieces read (a family of a rank, a step of a rank).
        skipped: pieces that were there already.
        problems: what could not be read, to how often.
        left_out: how much of that is damage, and not in the data base.
    """

    path: Path
    rows: int = 0
    units: int = 0
    skipped: int = 0
    problems: dict[str, int] = field(default_factory=dict)
    left_out: int = 0


@dataclass(frozen=True)
class Options:
    """How names and steps are taken over.

    Attributes:
        mapping: replacements in names, in their order.
        micro_step: the horizontal axis is the running number of micro batches; False: the step, and micro batches are targets.
        process_num: processes that read.
        force: replace a data base that is there.
    """

    mapping: Mapping[str, str] = field(default_factory=dict)
    micro_step: bool = True
    process_num: int = 1
    force: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.process_num <= MAX_PROCESSES:
            raise UsageError(f"process_num is {self.process_num}; allowed: 1 to {MAX_PROCESSES}")

    def name(self, name: str) -> str:
        for old, new in self.mapping.items():
            name = name.replace(old, new)
        return name

    @property
    def state(self) -> str:
        """What has to be the same for a data base to be gone on with."""
        return json.dumps([dict(self.mapping), self.micro_step])


def read_mapping(path: Path | str) -> dict[str, str]:
    """Replacements from a JSON file, an object of texts.

    Raises:
        UsageError: it is not there or is something else.
        UnreadableFileError: it is no regular file, or too large.
    """
    try:
        mapping = parse_json(read_input(path, MOST_MAPPING_BYTES))
    except OddFileError as error:
        raise UnreadableFileError(f"mapping {path}: {error.strerror}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f'mapping {path}: cannot be read ({error}); give a JSON file like {{"old": "new"}}') from None
    if not isinstance(mapping, dict) or not all(isinstance(v, str) and k for k, v in mapping.items()):
        raise UsageError(f'mapping {path}: must be a JSON object of texts, like {{"old": "new"}}')
    return mapping


class NothingHere(UsageError):
    """There is nothing of this kind."""


def open_database(directory: Path, name: str, data: Path, options: Options, **more: Any) -> TrendDatabase:
    """The data base, new or the one that an earlier conversion of the same data has begun.

    Raises:
        UsageError: another one is there and ``force`` is not set.
        SinkError: it cannot be written.
    """
    with guard_writing(directory, "give another --db"):
        make_directories(str(directory))
    path = directory / name
    wanted = {"data": str(data.resolve()), "options": options.state}
    if os.path.lexists(path):
        if options.force:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)
        elif _header(path) != wanted:
            raise UsageError(
                f"{path}: is there already and was made from other data, with other options or by another tool; "
                "give another --db, move it away, or replace it with --force"
            )
    database = TrendDatabase(path, **more)
    with database.transaction():
        for what, state in wanted.items():
            database.set_imported(what, state)
    return database


def _header(path: Path) -> dict[str, str]:
    try:
        with read_database(path) as db:
            return dict(db.execute("SELECT what, state FROM imports WHERE what IN ('data', 'options')"))
    except (OSError, ValueError, sqlite3.Error):
        return {}


def monitor2db(directory: Path, source: Path, options: Options) -> Imported:
    """Convert a monitored run.

    Raises:
        UsageError: there is none.
        SinkError: the data base cannot be written.
    """
    try:
        run = open_run(source)
    except UsageError as error:
        raise NothingHere(str(error)) from None
    database = open_database(directory, MONITOR_DB, source, options)
    done = Imported(database.path)
    try:
        _convert(run, database, options, done)
    finally:
        database.close()
    done.problems.update(run.problems)
    done.left_out = max(done.left_out, run.left_out)
    return done


def _convert(run: Run, database: TrendDatabase, options: Options, done: Imported) -> None:
    known = database.read_imports()
    units = [(rank, family) for rank in run.ranks for family in run.families(rank)]
    states = {unit: _state(run, *unit) for unit in units}
    todo = [unit for unit in units if known.get(_unit(*unit)) != states[unit]]
    done.skipped = len(units) - len(todo)
    axis = None
    if options.micro_step and todo:
        axis = _Axis()
        for counts in _read_units(run, units, _counts, options, done, "counting micro steps"):
            axis.add(counts)
        axis.close()
        if not axis.goes_on(known.get("axis", "")):
            raise UsageError(
                f"{database.path}: the data has more micro batches, or earlier steps, than when this data base was begun: "
                "its horizontal axis would change; replace it with --force, or use --micro_step false"
            )
        with database.transaction():
            database.set_imported("axis", axis.state)
    for unit, table in zip(todo, _read_units(run, todo, _table, options, done, "reading")):
        with database.transaction():
            done.rows += _add(database, *unit, table, axis, options)
            database.set_imported(_unit(*unit), states[unit])
        done.units += 1
    for rank in run.ranks:
        with database.transaction():
            info = {key: value for key, value in run.info(rank).items() if key != "losses"}  # no such file lies beside what is made here
            database.set_info(rank, json_text(info))
            scalars = run.scalars(rank).items()
            database.add_scalars(
                rank, ((step, name, v) for name, series in scalars for step, v in zip(series.steps.tolist(), series.values.tolist()))
            )
            database.replace_alerts(rank, ((int(alert["step"]), json_text(alert)) for alert in run.alerts(rank)))


def _add(database: TrendDatabase, rank: int, family: str, table: Table, axis: _Axis | None, options: Options) -> int:
    places = []
    for key in table.keys:
        key = key._replace(name=options.name(key.name), micro_step=-1 if axis is not None else key.micro_step)
        places.append(key)
    steps = table.steps
    if axis is not None:
        micro = np.array([max(key.micro_step, 0) for key in table.keys], np.int64)
        steps = axis.place(steps, micro[table.ids] if len(table.ids) else table.ids)
    # Several micro batches of one tensor are one target of this axis: they must not get a place each.
    where = {key: database.place(family, key) for key in dict.fromkeys(places)}
    metrics = np.array([where[key][0] for key in places], np.int64)
    targets = np.array([where[key][1] for key in places], np.int64)
    written = 0
    for metric in dict.fromkeys(metrics.tolist()):
        own_rows = np.flatnonzero(metrics[table.ids] == metric)
        own_rows = own_rows[np.lexsort((targets[table.ids[own_rows]], steps[own_rows]))]  # the order of the table on disk
        values = {op: column[own_rows] for op, column in table.values.items()}
        written += database.add(rank, metric, steps[own_rows], targets[table.ids[own_rows]].tolist(), values)
    return written


class _Axis:
    """The running number of every micro batch: all ranks and families together say how many a step has."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.steps = self.first = np.empty(0, np.int64)

    def add(self, counts: tuple[list[int], list[int]]) -> None:
        for step, count in zip(*counts):
            if count > self._counts.get(step, 0):
                self._counts[step] = count

    def close(self) -> None:
        self.steps = np.array(sorted(self._counts), np.int64)
        counts = np.array([self._counts[s] for s in self.steps.tolist()], np.int64)
        self.first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64) if len(counts) else counts

    def place(self, steps: Any, micro: Any) -> Any:
        return self.first[np.searchsorted(self.steps, steps)] + micro

    @property
    def state(self) -> str:
        return f"{len(self.steps)} {self._digest(len(self.steps))}"

    def goes_on(self, state: str) -> bool:
        """True when the steps that were there keep their places."""
        count, _, digest = state.partition(" ")
        return not state or (count.isdigit() and int(count) <= len(self.steps) and self._digest(int(count)) == digest)

    def _digest(self, count: int) -> str:
        return hashlib.sha256(self.steps[:count].tobytes() + self.first[:count].tobytes()).hexdigest()


def _unit(rank: int, family: str) -> str:
    return f"rank {rank} {family}"


def _state(run: Run, rank: int, family: str) -> str:
    """Changes when the files that hold the family change."""
    files = []
    for path in run.paths(rank):
        if path.is_dir():
            files += [Path(e.path) for e in scan(path) if family in families_of(e.name)]
        else:
            files.append(path)
    facts = [(file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


Job = Callable[[Run, int, str], Any]


def _read_units(run: Run, units: Sequence[tuple[int, str]], job: Job, options: Options, done: Imported, what: str) -> Iterator[Any]:
    """What `job` gives for every unit, in their order, read by several processes where that is wanted."""
    with bar(what, len(units)) as advance:
        if options.process_num == 1 or len(units) < 2:
            for rank, family in units:
                yield job(run, rank, family)
                advance(_unit(rank, family))
            return
        context = get_context("forkserver")
        with ProcessPoolExecutor(min(options.process_num, len(units)), context, _open_in_worker, (str(run.path),)) as pool:
            for unit, (result, problems, left_out) in zip(units, pool.map(_work, [(job, *unit) for unit in units])):
                done.problems.update(problems)
                done.left_out = max(done.left_out, left_out)
                yield result
                advance(_unit(*unit))


_run: Run | None = None


def _open_in_worker(path: str) -> None:
    global _run
    _run = open_run(path)


def _work(task: tuple[Job, int, str]) -> tuple[Any, dict[str, int], int]:
    job, rank, family = task
    assert _run is not None
    return job(_run, rank, family), _run.problems, _run.left_out


def _table(run: Run, rank: int, family: str) -> Table:
    return run.table(rank, family)


def _counts(run: Run, rank: int, family: str) -> tuple[list[int], list[int]]:
    """Steps of a table and how many micro batches each has."""
    table = run.table(rank, family)
    micro = np.array([max(key.micro_step, 0) + 1 for key in table.keys], np.int64)
    steps, places = np.unique(table.steps, return_inverse=True)
    counts = np.ones(len(steps), np.int64)
    if len(table.ids):
        np.maximum.at(counts, places, micro[table.ids])
    return steps.tolist(), counts.tolist()
