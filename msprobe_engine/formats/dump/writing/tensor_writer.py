"""The threads that make files of the tensors that hooks have put into a `TensorStore` (`tensors`)."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Entry
from msprobe_engine.formats.dump.layout import DumpWriteError
from msprobe_engine.formats.dump.writing.disk_quota import DiskQuota
from msprobe_engine.formats.dump.writing.host_memory import HostMemory
from msprobe_engine.formats.dump.writing.step_files import LOST, NOT_WRITTEN, Payload, StepFiles
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.formats.dump.writing.tensor_names import tensor_files

_TOGETHER = 1 << 20

Job = tuple[StepFiles, "list[Payload | tuple[int, Entry]]"]


class TensorWriter:
    """See `tensors.TensorStore`."""

    waits = True

    def __init__(
        self,
        options: Options,
        faults: Faults,
        *,
        budget: int,
        quota: int,
        count: Callable[[str, int], None],
        threads: int,
        patience: float,
    ) -> None:
        self.options = options
        self.memory = HostMemory(budget, self._hurry, patience)
        self.quota = DiskQuota(quota)
        self._faults = faults
        self._count = count
        self._patience = patience
        self._steps: dict[int, StepFiles] = {}
        self._lock = threading.Lock()
        self._done = threading.Condition(self._lock)
        self._pool: WriterPool[Job] = WriterPool(self._run_job, threads)
        self.with_frames = False
        self._progress = 0
        self._error: BaseException | None = None

    def _wait(self, unfinished: Callable[[], bool], patience: float) -> bool:
        """Wait while there is something unfinished; False when nothing at all was written for so many seconds."""
        with self._done:
            while unfinished():
                before = self._progress
                if not self._done.wait_for(lambda: self._progress != before, patience):  # noqa: B023 - called before it changes
                    return False
        return True

    def _send(self, files: StepFiles) -> None:
        """Give the batch to the writer threads; the caller holds the lock."""
        batch, files.batch, files.batch_bytes = files.batch, [], 0
        if not batch and not self.memory.waiting and not files.closed:
            return
        files.pending += 1
        self._pool.put((files, batch))

    def _hurry(self) -> None:
        with self._lock:
            for files in self._steps.values():
                if not files.finishing:
                    self._send(files)
        self._pool.help()

    def _run_job(self, job: Job) -> None:
        files, batch = job
        try:
            self._work(files, batch)
        except BaseException as error:
            self._fail(error, files.tensors)
        finally:
            with self._lock:
                last = files.closed and files.pending == 1 and not files.finishing and self.waits and not self.with_frames
                files.finishing |= last
            if last:
                self._complete(files)
            with self._done:
                files.pending -= 1
                self._progress += 1
                self._done.notify_all()

    def _complete(self, files: StepFiles) -> None:
        """All bytes and names of a step are here: write what stands for the whole of it, once."""
        if not files.complete:
            files.complete = True
            jobs: list[Callable[[], None]] = [files.resolve_repeated_names, files.format.finish, files.write_not_saved]
            for job in jobs:
                try:
                    job()
                except Exception as error:
                    self._fail(error, files.tensors)

    def _work(self, files: StepFiles, batch: list[Payload | tuple[int, Entry]]) -> None:
        for item in batch:  # names first: a file that knows its name is written once and renamed once
            if not isinstance(item, Payload):
                try:
                    order, entry = item
                    files.name(order, tensor_files(entry, self.options.sections(entry), self.options.suffix))
                except Exception as error:
                    self._fail(error, files.tensors)
        ready: list[Payload] = []
        nbytes = 0
        for item in batch:
            if isinstance(item, Payload):
                try:
                    if item.ready is not None:
                        item.ready.wait()
                        item.ready = None
                except Exception as error:
                    self._lose_payload(files, item, error)
                    continue
                ready.append(item)
                nbytes += item.nbytes
                if nbytes >= _TOGETHER:  # memory comes free as soon as it can
                    files.format.contents(ready)
                    ready, nbytes = [], 0
        if ready:
            files.format.contents(ready)
        if self.memory.waiting:
            files.format.flush()

    def _wait_for_writers(self, files: StepFiles) -> None:
        """Wait for the writer threads."""
        with self._done:
            if not files.finishing:
                self._send(files)
        self._pool.help()
        with self._done:
            while files.pending:
                self._done.wait()
            files.finishing = True

    def _release(self, payload: Payload) -> None:
        slab, payload.slab = payload.slab, None
        if slab is not None:
            self.memory.release(slab)
            self._progress += 1

    def _lose_payload(self, files: StepFiles, payload: Payload, error: Exception) -> None:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        with files.lock:
            payload.state, payload.why = LOST, why
            names, payload.names = payload.names, []
            for name in names:
                files.lose(name, payload.nbytes, why)
            files.count(NOT_WRITTEN)
        self.quota.release(payload.reserved)
        payload.reserved = 0
        self._release(payload)
        self._fail(error, files.tensors)

    def _fail(self, error: BaseException, path: str) -> None:
        with self._lock:
            self._count("tensor files", 1)
        problem = DumpWriteError(error, path) if isinstance(error, OSError) and error.errno else error
        try:
            self._faults.fail("tensor files", problem, disable=False, hint="tensors without a file are listed in not_saved.json")
        except BaseException as strict:  # for the training thread
            self._error = strict


IDLE_SECONDS = 10.0
_log = get_logger()
Item = TypeVar("Item")


class WriterPool(Generic[Item]):
    """Runs jobs, in the order in which they were put when there is one thread.

    Args:
        run: does one job; must not raise.
        threads: at most so many.
    """

    def __init__(self, run: Callable[[Item], None], threads: int) -> None:
        self._run = run
        self._most = threads
        self._threads = 0
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._said = self._failed = False

    def put(self, job: Item) -> None:
        with self._lock:
            self._queue.put(job)
            if self._threads >= self._most or os.getpid() != self._process:
                return
            try:
                threading.Thread(target=self._serve, name="msprobe-tensors", daemon=True).start()
                self._threads += 1
            except RuntimeError:  # no more threads for this process, or it is about to end
                if not self._said:
                    self._said = True
                    _log.warning("no thread can be started for tensor files: the training waits while they are written")

    def help(self) -> None:
        """To be called by whoever is about to wait for jobs: where no thread could be started they are done here."""
        with contextlib.suppress(queue.Empty):
            while not self._threads:
                self._run_job(self._queue.get_nowait())

    def _serve(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._threads -= 1
                        return
            else:
                self._run_job(job)
                del job  # a thread that waits for the next one must not keep a step's records alive

    def _run_job(self, job: Item) -> None:
        """A fault must not end the thread: jobs that come later would wait for ever."""
        try:
            self._run(job)
        except Exception as error:
            if not self._failed:
                self._failed = True
                _log.error("tensor files lost data, training goes on: %s: %s", type(error).__name__, error)
