"""``msprobe graph``: graphs of all ranks and steps of a dump, or of two beside each other, made in processes and given to writers.

The time in the names of the files of one run: two runs that begin in one second must not write the same ones, and what a killed run
has left is taken away by a later one.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from msprobe_engine.align.mapping.user_mapping import Mappings
from msprobe_engine.core.errors import NothingCapturedError, SinkError
from msprobe_engine.core.io.progress import bar
from msprobe_engine.core.io.regular_files import FILE_MODE, NEW_FILE, open_regular
from msprobe_engine.core.process.jobs import run_jobs
from msprobe_engine.find.detect import Run
from msprobe_engine.find.run_directory import incidents_left_out
from msprobe_engine.formats.dump.replicas.reader import StepTables
from msprobe_engine.report.graph import global_suspect, same_graphs
from msprobe_engine.report.graph.global_suspect import Key
from msprobe_engine.report.graph.job import Job
from msprobe_engine.report.graph.nodes.links import Linked
from msprobe_engine.report.graph.nodes.model import Comparison, Graph
from msprobe_engine.report.graph.options import GraphOptions
from msprobe_engine.report.graph.source import jobs_of
from msprobe_engine.report.graph.summary import Result
from msprobe_engine.report.graph.work import Part, build_failed_part, run_job, unlike
from msprobe_engine.report.graph.writer import MERGED_DUMP, Plan, Writer, open_writer
from msprobe_engine.report.table import same_ranks
from msprobe_engine.report.table_files import output_directory
from msprobe_engine.report.table_files.tablefile import unwritable

_BYTES_PER_BYTE = 12
"""Memory of graphs, per byte of their dump files."""

Progress = Callable[[str], None]


def run(
    target: str | Path,
    golden: str | Path | None = None,
    output: str | Path = "./output",
    options: GraphOptions | None = None,
    progress: Progress | None = None,
) -> Result:
    """Draw a dump, or two beside each other.

    Args:
        target: the root of a dump, a step, a rank directory, or a dump.json.
        golden: a run that is right, of the same kind; None: the target alone.
        output: directory of the files; made when it is not there.
        options: None: `GraphOptions()`.
        progress: is told what has been done, a line each.

    Raises:
        DumpFormatError: there is no dump at a path.
        NothingCapturedError: there is, and nothing of it can be drawn.
        SinkError: the output cannot be written.
        UsageError: the options do not fit each other or the data.
    """
    options = options or GraphOptions()
    sources = jobs_of(target, golden, options)
    if sources.merge:
        options = replace(options, merge="auto")
    directory = output_directory(output)
    runs = Run(Path(target)), Run(Path(golden)) if golden else None
    left_out = [] if options.steps or options.ranks else incidents_left_out(*runs)
    result = Result(str(target), str(golden or ""), notes=sources.notes, problems=[*sources.lost, *left_out])
    result.other_steps = next(((job.step, job.golden_step) for job in sources.jobs if job.golden and job.step != job.golden_step), None)
    tables = StepTables(scheduler=options.scheduler)
    led = same_graphs.leaders(sources.jobs, options, tables)
    alone = [job for job in sources.jobs if job.key not in led]
    with reserve(directory) as stamp, _Store(directory, alone, options, stamp) as store:
        made: dict[Key, Part] = {}

        def make_parts(jobs: Sequence[Job]) -> None:
            made.update(_make_parts(jobs, options, store, progress))

        followed = same_ranks.run(sources.jobs, lambda job: job.key, led, make_parts, store.has)
        _collect_messages(result, made)
        if not any(store.has(key) for key in made):
            raise NothingCapturedError(f"{target}: nothing of it can be drawn" + "".join(f"\n  {problem}" for problem in result.problems))
        calls = same_graphs.calls(made, followed, led, tables)
        alike = same_graphs.alike(sources.jobs, followed, led, tables)
        behind = {job.key for job in followed}
        looked_at = [job for job in sources.jobs if job.key in behind or store.has(job.key)]
        suspects = _suspects(looked_at, {key for key, part in made.items() if part.nonfinite}, options, store, result, tables)
        if apart := same_graphs.apart(followed, led, suspects):
            make_parts(apart)
            alike = alike.without([job.key for job in apart])
        there = [made[job.key] for job in sources.jobs if job.key in made and store.has(job.key)]
        if suspects.first is not None and suspects.first not in made:
            suspects.first = led.get(suspects.first, suspects.first)
        if alike.same:
            result.same = sum(map(len, alike.same.values()))
            result.notes.append(same_graphs.describe_same_graphs(result.same))
        places = tuple(part.job.key for part in there)
        plan = Plan(directory, stamp, options, result.target, result.golden, places, suspects.first, alike)
        _write(plan, there, store, same_graphs.links(there, calls), suspects, result, progress)
    return result


def _collect_messages(result: Result, made: Mapping[Key, Part]) -> None:
    for part in made.values():
        result.problems += [problem for problem in part.problems if problem not in result.problems]
        result.notes += [note for note in part.notes if note not in result.notes]
    result.notes += unlike(made.values())


def _make_parts(jobs: Sequence[Job], options: GraphOptions, store: _Store, progress: Progress | None) -> dict[Key, Part]:
    """All parts, by step and rank; what they made is in the store."""
    parts: dict[Key, Part] = {}
    work, tasks, kind = partial(run_job, options=options), list(jobs), "auto"
    if options.scheduler:
        work, tasks, kind = partial(run_job, options=options.for_workers()), [job.for_workers() for job in jobs], "dask"
    with bar("graph", len(jobs)) as advance:
        for job, part in run_jobs(tasks, work, build_failed_part, kind, options.workers, options.memory_mb, options.scheduler):
            if part.made is not None:
                store.add(job.key, part.made)
            part.made = None
            parts[job.key] = part
            advance(job.place)
            if progress is not None:
                progress(f"{job.place}: read and drawn")
    return {job.key: parts[job.key] for job in jobs}


def _suspects(
    jobs: Sequence[Job], bad: set[Key], options: GraphOptions, store: _Store, result: Result, tables: StepTables
) -> global_suspect.Suspects:
    if result.golden:
        mappings = Mappings(layer=options.layer_mapping if options.layer_mapping not in (None, True) else None)
        known = store.comparisons_in_memory()
        if len(known) < len(jobs):
            known = {}  # what is alike is walked once, with the graph's own ranks among it
        suspects = global_suspect.of_two(jobs, (result.target, result.golden), mappings, known, tables, result.problems)
    else:
        suspects = global_suspect.of_one(jobs, bad, tables, result.problems)
    store.forget_walks()
    result.finding, result.headline, result.why = suspects.finding, suspects.headline, suspects.why
    result.problems += [problem for problem in suspects.problems if problem not in result.problems]
    return suspects


def _write(
    plan: Plan,
    parts: Sequence[Part],
    store: _Store,
    links: Mapping[Key, tuple[Linked, ...]],
    suspects: global_suspect.Suspects,
    result: Result,
    progress: Progress | None,
) -> None:
    writers: list[Writer] = []
    try:
        for mode in (MERGED_DUMP,) if plan.options.file_type == "json" else dict.fromkeys(plan.options.formats):
            writers.append(open_writer(mode, plan))
        with bar("write", len(parts)) as advance:
            for part in parts:
                made = store.pop(part.job.key)
                graphs = (made.target, made.golden) if isinstance(made, Comparison) else (made,)
                for graph, linked in zip(graphs, links.get(part.job.key, ())):
                    graph.links = linked
                global_suspect.insert_suspects(made, suspects)
                result.count(part.job.key, made)
                for writer in writers:
                    writer.add(made)
                advance(part.job.place)
                if progress is not None:
                    progress(f"{part.job.place}: written")
        for writer in writers:
            result.files += writer.finish()
    except BaseException:
        for writer in writers:
            writer.abort()
        raise


class _Store:
    """Graphs between their making and their writing, which has to wait until all ranks of a step have told their communication calls. In
    memory while they are small, else in a directory of its own that only this user can enter."""

    def __init__(self, output: Path, jobs: Sequence[Job], options: GraphOptions, stamp: str) -> None:
        self._prefix = waiting_prefix(stamp)
        self._in_memory = sum(job.size for job in jobs) * _BYTES_PER_BYTE < options.memory_mb << 20 or len(jobs) == 1
        self._made: dict[Key, Graph | Comparison | None] = {}
        self._output = output
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> _Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.clear()
        if self._directory is not None:
            self._directory.cleanup()

    def add(self, key: Key, made: Graph | Comparison) -> None:
        """Keep one.

        Raises:
            SinkError: the disk is full.
        """
        if self._in_memory:
            self._made[key] = made
            return
        self._made[key] = None
        try:
            with self._open(key, "xb") as file:
                pickle.dump(made, file, pickle.HIGHEST_PROTOCOL)
        except OSError as error:
            raise SinkError(f"{self._output}: cannot keep the graphs of {key} ({error.strerror or error}); is the disk full?") from error

    def has(self, key: Key) -> bool:
        return key in self._made

    def pop(self, key: Key) -> Graph | Comparison:
        """Hand one over; it is not kept any longer."""
        made = self._made.pop(key)
        if made is not None:
            return made
        with self._open(key, "rb") as file:
            kept: Graph | Comparison = pickle.load(file)  # our own, from a directory that nobody else can write
        os.unlink(file.name)
        return kept

    def comparisons_in_memory(self) -> dict[Key, Comparison]:
        return {key: made for key, made in self._made.items() if isinstance(made, Comparison)}

    def forget_walks(self) -> None:
        """What the diagnosis has made is not needed any longer."""
        for made in self.comparisons_in_memory().values():
            made.begun = None

    @contextmanager
    def _open(self, key: Key, mode: str) -> Iterator[IO[bytes]]:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(dir=self._output, prefix=self._prefix)  # mode 0700
        with open(Path(self._directory.name) / f"{key[0]}_{key[1]}", mode) as file:
            yield file


_STAMP = "%Y%m%d%H%M%S"
_MOST_AT_ONCE = 1000
_LEFT_SECONDS = 3600.0
"""A run whose lock is younger is left alone: some network file systems do not say whether another machine still holds it."""
_LOCK, _SUFFIX = ".graph_", ".lock"


@contextmanager
def reserve(output: Path) -> Iterator[str]:
    """A time of 14 digits that no other run in the directory has, and no file of an earlier one.

    Raises:
        SinkError: the directory cannot be written.
    """
    _sweep(output)
    now = time.time()
    for later in range(_MOST_AT_ONCE):
        stamp = time.strftime(_STAMP, time.localtime(now + later))
        lock = output / f"{_LOCK}{stamp}{_SUFFIX}"
        try:
            held = os.open(lock, NEW_FILE, FILE_MODE)
        except FileExistsError:
            continue
        except OSError as error:
            raise unwritable(lock, error) from error
        try:
            with suppress(OSError):  # file systems without locks: nobody can take it, so nobody takes our files away
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not any(path.name[0] != "." for path in output.glob(f"*_{stamp}.*")):
                yield stamp
                return
        finally:
            with suppress(OSError):
                lock.unlink()
            os.close(held)
    raise SinkError(f"{output}: {_MOST_AT_ONCE} graphs are written here at once; name another output directory")


def waiting_prefix(stamp: str) -> str:
    """What the name of a run's directory for what waits to be written begins with."""
    return f"{_LOCK}{stamp}_"


def _sweep(output: Path) -> None:
    """Remove what runs have left that were killed: the system gives up a lock with its process."""
    for lock in output.glob(f"{_LOCK}{'[0-9]' * 14}{_SUFFIX}"):
        with suppress(OSError):
            held = open_regular(lock, os.O_RDWR)
            try:
                if time.time() - os.fstat(held).st_mtime < _LEFT_SECONDS:
                    continue
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stamp = lock.name[len(_LOCK) : -len(_SUFFIX)]
                for file in output.glob(f".*_{stamp}.*.tmp"):
                    file.unlink(missing_ok=True)
                for directory in output.glob(f"{waiting_prefix(stamp)}*"):
                    shutil.rmtree(directory, ignore_errors=True)
                lock.unlink()
            finally:
                os.close(held)
