"""Runs the tasks of a comparison: in this process, in others, or on a Dask cluster; at most so many at a time as memory allows.

A task that breaks its worker (killed for memory) is done again, alone; on a cluster another worker does it. What is done is noted in a
file of the output directory, so that an interrupted comparison goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msprobe_engine.align.sources import Task
from msprobe_engine.core.errors import DumpFormatError, MissingExtraError, SinkError, UsageError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import FILE_MODE, NEW_FILE, open_regular
from msprobe_engine.core.process.cores import usable_cores
from msprobe_engine.formats.dump.reader import parse_json, read_bytes
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.rank_table import Result, failed
from msprobe_engine.report.table_files import unwritable


class Job(Protocol):
    """A piece of work: a file or two to be read."""

    @property
    def size(self) -> int:
        """Bytes of the files."""


J = TypeVar("J", bound=Job)
R = TypeVar("R")
Work = Callable[[Task], Result]

SMALL = 8 << 20
"""Bytes of dumps below which other processes would cost more than they save."""

BYTES_PER_BYTE = 8
"""Memory of a task, per byte of its two dump files: the columns of both sides, and a block of the file as objects."""

_RETRIES = 3
_STAMP = "%Y%m%d%H%M%S"
_MOST_AT_ONCE = 1000


def run_tasks(
    tasks: Sequence[Task], work: Work, kind: str, workers: int, memory_mb: int, address: str = ""
) -> Iterator[tuple[Task, Result]]:
    """`run_jobs`, of the tasks of a comparison."""
    return run_jobs(tasks, work, failed, kind, workers, memory_mb, address)


def run_jobs(
    tasks: Sequence[J],
    work: Callable[[J], R],
    lost: Callable[[J, BaseException], R],
    kind: str,
    workers: int,
    memory_mb: int,
    address: str = "",
) -> Iterator[tuple[J, R]]:
    """Do the tasks; results come as they are ready.

    Args:
        tasks: what is to be done, the first ones first.
        work: does one task; for processes and clusters it must be one that pickle can name.
        lost: the result of a task whose process was killed twice.
        kind: one of `msprobe_engine.measure.options.SCHEDULERS`.
        workers: how many at a time; 0: one per core.
        memory_mb: MiB that all tasks in flight may take together; a single one is always done.
        address: of a Dask scheduler (``tcp://host:8786``), for the kind ``dask``.

    Raises:
        MissingExtraError: Dask is not installed.
        ProbeError: of `work`; the tasks that were not begun are not done.
        UsageError: no cluster answers at the address.
    """
    workers = workers or usable_cores()
    kind = _kind(tasks, kind, workers)
    if kind == "serial":
        for task in tasks:
            yield task, work(task)
        return
    broken: list[J] = []
    with _executor(kind, min(workers, len(tasks)), address) as executor:
        most = len(tasks) if kind == "dask" else workers
        yield from _in_flight(executor, tasks, work, most, memory_mb << 20, broken)
    for task in broken:  # alone: what killed the worker may have been the others
        with _executor("processes", 1, "") as executor:
            try:
                yield task, _submit(executor, work, task).result()
            except BrokenProcessPool:
                yield task, lost(task, MemoryError("the process that read it was killed (out of memory?); give a larger machine"))


def _kind(tasks: Sequence[Job], kind: str, workers: int) -> str:
    if kind != "auto":
        return kind
    small = sum(task.size for task in tasks) < SMALL
    return "serial" if workers == 1 or len(tasks) < 2 or small else "processes"


def _in_flight(
    executor: Executor, tasks: Sequence[J], work: Callable[[J], R], most: int, memory: int, broken: list[J]
) -> Iterator[tuple[J, R]]:
    waiting, used = list(reversed(tasks)), 0
    flying: dict[Future[R], J] = {}
    while waiting or flying:
        while waiting and len(flying) < most and (not flying or used + _memory(waiting[-1]) <= memory):
            task = waiting.pop()
            try:
                flying[_submit(executor, work, task)] = task
            except BrokenProcessPool:
                broken.append(task)
                continue
            used += _memory(task)
        done, _ = wait(flying, return_when=FIRST_COMPLETED)
        for future in done:
            task = flying.pop(future)
            used -= _memory(task)
            try:
                result = future.result()
            except BrokenProcessPool:
                broken.append(task)
            else:
                yield task, result


def _memory(task: Job) -> int:
    return task.size * BYTES_PER_BYTE


def _submit(executor: Executor, work: Callable[[J], R], task: J) -> Future[R]:
    with _main_hidden():
        return executor.submit(work, task)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """New processes would import the script that called us, and run it once more where it does not ask for ``__main__``."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _executor(kind: str, workers: int, address: str) -> Iterator[Executor]:
    if kind == "dask":
        yield from _cluster(address)
    elif kind == "threads":
        with ThreadPoolExecutor(workers) as executor:
            yield executor
    else:
        import multiprocessing

        pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def _cluster(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError:
        raise MissingExtraError("distributed", "dask", "a comparison on a Dask cluster") from None
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise UsageError(f"--scheduler {address!r}: no Dask scheduler answers there ({error}); give tcp://host:port") from None
    with client:
        yield client.get_executor(retries=_RETRIES, pure=False)


class Manifest:
    """What of a comparison is done, in ``.compare_{key}.json`` of the output directory; gone when the comparison is complete.

    A task counts as done while its dump files and its results are the ones that were noted. The first line of the file has the time; a
    line is added for each task, so that thousands of them cost no more than a line each. A line that is cut off is left out.

    Attributes:
        stamp: time in the names of the files; that of the earlier try, if there was one. No other comparison in the directory has it.
    """

    def __init__(self, output: Path, key: str) -> None:
        self._path = output / f".compare_{key}.json"
        self.stamp = time.strftime(_STAMP)
        self._done: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, DumpFormatError):
            self._continue([line for line in read_bytes(self._path).split(b"\n") if line])
        self._lock = output / f".compare_{self.stamp}.lock"
        if not self._done:
            self._reserve(output)

    def _continue(self, lines: Sequence[bytes]) -> None:
        """What an earlier try has noted, if its time is one."""
        documents: list[Any] = []
        for line in lines:
            with contextlib.suppress(DumpFormatError):
                documents.append(parse_json(line, self._path))
        stamp = documents[0].get("stamp") if documents and isinstance(documents[0], dict) else None
        if isinstance(stamp, str) and re.fullmatch("[0-9]{14}", stamp, re.ASCII):
            noted = [one for one in documents[1:] if isinstance(one, dict) and isinstance(one.get("task"), str)]
            self._done = {one["task"]: one for one in noted}
            self.stamp = stamp if self._done else self.stamp

    def _reserve(self, output: Path) -> None:
        """Two comparisons that begin in one second must not write the same files: the later one takes the next second's name."""
        moment = time.mktime(time.strptime(self.stamp, _STAMP))
        for later in range(_MOST_AT_ONCE):
            stamp = time.strftime(_STAMP, time.localtime(moment + later))
            lock = output / f".compare_{stamp}.lock"
            try:
                os.close(os.open(lock, NEW_FILE, FILE_MODE))
            except FileExistsError:
                continue
            except OSError as error:
                raise unwritable(lock, error) from error
            if (output / f"compare_summary_{stamp}.json").exists():
                lock.unlink(missing_ok=True)
                continue
            self.stamp, self._lock = stamp, lock
            return
        raise SinkError(f"{output}: {_MOST_AT_ONCE} comparisons write here at once; name another output directory")

    def release(self) -> None:
        """The results have their names now, or there will be none."""
        with contextlib.suppress(OSError):
            self._lock.unlink()

    def done(self, task: Task) -> Result | None:
        """The result of an earlier try, if it still holds."""
        entry = self._done.get(task.key)
        if not isinstance(entry, Mapping) or entry.get("inputs") != _inputs(task):
            return None
        try:
            result = Result.from_json(entry["result"])
        except (AttributeError, KeyError, TypeError):
            return None
        return result if all(os.path.isfile(file) for file in result.files) else None

    def note(self, task: Task, result: Result) -> None:
        """Remember a result without problems; those with problems are tried again."""
        if result.problems:
            return
        entry = {"task": task.key, "inputs": _inputs(task), "result": result.as_json() | {"begins": result.begins}}
        head = b"" if self._done else json.dumps({"stamp": self.stamp}).encode() + b"\n"
        self._done[task.key] = entry
        with contextlib.suppress(OSError):  # then nothing can be continued, and nothing else is lost
            if head:
                write_file(self._path, [head])
            descriptor = open_regular(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, b"\n" + json.dumps(entry).encode() + b"\n")
            finally:
                os.close(descriptor)

    def remove(self) -> None:
        """The comparison is complete."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def absolute_task(task: Task) -> Task:
    """A task for a process that may run in another directory."""
    paths: dict[str, Any] = {
        name: Path(os.path.abspath(path)) for name in ("target", "golden", "stack") if (path := getattr(task, name)) is not None
    }
    return replace(task, **paths, calibration=_absolute(task.calibration))


def absolute_options(options: CompareOptions) -> CompareOptions:
    """Options for a process that may run in another directory: what is the name of a file is an absolute one."""
    files = ("data_mapping", "cell_mapping", "api_mapping", "layer_mapping", "postprocess")
    named: dict[str, Any] = {
        name: os.path.abspath(given) for name in files if isinstance(given := getattr(options, name), (str, os.PathLike))
    }
    return replace(options, **named, calibration=_absolute(options.calibration), metrics=_absolute(options.metrics))


def _absolute(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(Path(os.path.abspath(path)) for path in paths)


def _inputs(task: Task) -> list[list[Any]]:
    """Size and time of change of both files."""
    found = []
    for path in (task.target, task.golden):
        try:
            status = path.stat()
            found.append([os.fspath(path), status.st_size, status.st_mtime_ns])
        except OSError:
            found.append([os.fspath(path), -1, 0])
    return found
