"""Runs pieces of work: in this process or in others, at most so many at a time as memory allows; or on a Dask cluster, whose workers have
their own memory.

A piece that breaks its worker (killed for memory) is done again, alone; on a cluster another worker does it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from msprobe_engine.core.errors import UsageError, needs_extra
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.process.cores import usable_cores

_log = get_logger()


class Job(Protocol):
    """A piece of work: a file or two to be read."""

    @property
    def size(self) -> int:
        """Bytes of the files."""


J = TypeVar("J", bound=Job)
T = TypeVar("T")
R = TypeVar("R")

SMALL = 8 << 20
"""Bytes of dumps below which other processes would cost more than they save."""

BYTES_PER_BYTE = 8
"""Memory of a task, per byte of its two dump files: the columns of both sides, and a block of the file as objects."""

_RETRIES = 3


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
        kind: ``auto``, ``serial``, ``threads``, ``processes`` or ``dask``.
        workers: how many at a time on this machine; 0: one per core.
        memory_mb: MiB that all tasks in flight on this machine may take together; a single one is always done.
        address: of a Dask scheduler (``tcp://host:8786``), for the kind ``dask``, whose workers may run in other directories.

    Raises:
        MissingExtraError: Dask is not installed.
        ProbeError: of `work`; the tasks that were not begun are not done.
        UsageError: no cluster answers at the address.
    """
    if kind == "dask":
        yield from on_cluster(tasks, work, address)
        return
    workers = workers or usable_cores()
    kind = _kind(tasks, kind, workers)
    if kind == "serial":
        for task in tasks:
            yield task, work(task)
        return
    broken: list[J] = []
    with _executor(kind, min(workers, len(tasks))) as executor:
        yield from _in_flight(executor, tasks, work, workers, memory_mb << 20, broken)
    for task in broken:  # alone: what killed the worker may have been the others
        with _executor("processes", 1) as executor:
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
        finished, _ = wait(flying, return_when=FIRST_COMPLETED)
        for future in finished:
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


def _submit(executor: Executor, work: Callable[[T], R], task: T) -> Future[R]:
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
def _executor(kind: str, workers: int) -> Iterator[Executor]:
    if kind == "threads":
        with ThreadPoolExecutor(workers) as executor:
            yield executor
    else:
        import multiprocessing

        pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def on_cluster(tasks: Sequence[T], work: Callable[[T], R], address: str) -> Iterator[tuple[T, R]]:
    """As `run_jobs` on a Dask cluster, of tasks of any type. Work of a worker that is killed is given to another one.

    Raises:
        as there.
    """
    with cluster(address) as client:
        executor = client.get_executor(retries=_RETRIES, pure=False)
        flying = {_submit(executor, work, task): task for task in tasks}
        for future in as_completed(flying):
            yield flying[future], future.result()


_clients: dict[str, Any] = {}


@contextmanager
def cluster(address: str) -> Iterator[Any]:
    """A connection to the scheduler of a Dask cluster, one for all that is done inside; none for an empty address.

    Raises:
        MissingExtraError: Dask is not installed.
        UsageError: no scheduler answers at the address.
    """
    if address in _clients or not address:
        yield _clients.get(address)
        return
    with needs_extra("distributed", "dask", "work on a Dask cluster"):
        from distributed import Client
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise UsageError(f"--scheduler {address!r}: no Dask scheduler answers there ({error}); give tcp://host:port") from None
    with client:
        if not client.scheduler_info()["workers"]:
            _log.warning("the Dask scheduler at %s has no worker; the work waits until one joins", address)
        _clients[address] = client
        try:
            yield client
        finally:
            del _clients[address]
