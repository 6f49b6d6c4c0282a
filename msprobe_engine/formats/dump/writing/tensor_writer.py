"""The threads that make files of the tensors that hooks have put into a `TensorStore` (`tensors`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Entry
from msprobe_engine.formats.dump.layout import DumpWriteError
from msprobe_engine.formats.dump.writing.disk_quota import DiskQuota
from msprobe_engine.formats.dump.writing.host_memory import HostMemory
from msprobe_engine.formats.dump.writing.step_files import LOST, NOT_WRITTEN, Payload, StepFiles
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.formats.dump.writing.tensor_names import tensor_files
from msprobe_engine.formats.dump.writing.writer_pool import WriterPool

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
        self._pool: WriterPool[Job] = WriterPool(self._do, threads)
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

    def _do(self, job: Job) -> None:
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
            jobs: list[Callable[[], None]] = [files.settle, files.format.finish, files.write_not_saved]
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
                    self._failed(files, item, error)
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

    def _settle(self, files: StepFiles) -> None:
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
            self.memory.give(slab)
            self._progress += 1

    def _failed(self, files: StepFiles, payload: Payload, error: Exception) -> None:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        with files.lock:
            payload.state, payload.why = LOST, why
            names, payload.names = payload.names, []
            for name in names:
                files.lose(name, payload.nbytes, why)
            files.count(NOT_WRITTEN)
        self.quota.give(payload.reserved)
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
