"""Jobs that are worked off block by block by several threads: reads and kernels let go of the interpreter's lock, so they overlap.

Threads take blocks in the order in which the files have them, and all blocks of a job are done before its end is told.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.process.cores import usable_cores
from msprobe_engine.formats.checkpoint.blocks import Block, Room
from msprobe_engine.formats.tensors.file_reads import FileReads, ReadsOfThreads, Unreadable

BLOCK_BYTES = 2 << 20
"""Of one side. Two sides of this size stay in the cache of a core between reading and comparing."""
LEAST_BLOCK = 64 << 10
LEAST_MEMORY_MB = 192
DEFAULT_MEMORY_MB = 2048
MOST_WORKERS = 64
_BATCH, _BATCH_ELEMENTS = 64, 1 << 17
"""Blocks that a thread takes at once: many small ones, or one large one."""
_ROOMS = 3
"""A thread's: one per side, and one for copies. Each has two buffers."""


class Plan(NamedTuple):
    """How blocks are worked off.

    Attributes:
        memory: bytes for buffers of all threads.
        workers: threads.
        atol, rtol: the gate of a comparison; both 0: bits.
    """

    memory: int
    workers: int
    atol: float = 0.0
    rtol: float = 0.0

    @property
    def block_bytes(self) -> int:
        """Of one side's block."""
        return max(LEAST_BLOCK, min(BLOCK_BYTES, self.memory // (self.workers * _ROOMS * 2)))


def plan(memory_mb: int = DEFAULT_MEMORY_MB, workers: int | None = None, atol: float = 0.0, rtol: float = 0.0) -> Plan:
    """A plan that stays within `memory_mb` for the process as a whole.

    Args:
        workers: threads; None: twice the processor's cores, at least 4 and at most 16: most of the time they wait for files.

    Raises:
        UsageError: too little memory, or no sensible number of threads.
    """
    if memory_mb < LEAST_MEMORY_MB:
        raise UsageError(f"memory_mb: {memory_mb} is too little; allowed are {LEAST_MEMORY_MB} and more (MiB, of the whole process)")
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise UsageError(f"workers: {workers} is out of range; allowed are 1 to {MOST_WORKERS}")
    if atol < 0 or rtol < 0:
        raise UsageError(f"atol {atol:g} and rtol {rtol:g} must not be below 0")
    # the interpreter with numpy takes 60 MB, what is known of 10,000 tensors some tens
    return Plan((memory_mb // 4) << 20, workers or min(16, max(4, 2 * usable_cores())), atol, rtol)


class Job(ABC):
    """A tensor or a pair on its way.

    Attributes:
        lock: to be held while a block's result is added.
        trouble: why its blocks cannot all be read; no further ones are.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.trouble = ""
        self._left = 1  # the one that hands out its blocks

    @abstractmethod
    def blocks(self, most_bytes: int) -> Iterable[Block]:
        """Its blocks.

        Raises:
            Unreadable: it has none.
        """

    @abstractmethod
    def work(self, block: Block, rooms: list[Room], reads: FileReads) -> None:
        """Read a block and add what it gives.

        Raises:
            Unreadable: a file cannot be read.
        """

    def one_more(self) -> None:
        """A block was handed out."""
        with self.lock:
            self._left += 1

    def one_less(self) -> bool:
        """A block is done, or all were handed out; True: that was the last."""
        with self.lock:
            self._left -= 1
            return self._left == 0


J = TypeVar("J", bound=Job)


class Pool(ABC, Generic[J]):
    """The threads. `finish_job` is called with each job when all its blocks are done, one call at a time."""

    def __init__(self, how: Plan) -> None:
        self._plan = how
        self._reads = ReadsOfThreads()
        self._queue: queue.Queue[list[tuple[J, Block]] | None] = queue.Queue(maxsize=4 * how.workers)
        self._batch: list[tuple[J, Block]] = []
        self._room = _BATCH_ELEMENTS
        self._lock = threading.Lock()
        self._stop: BaseException | None = None

    @abstractmethod
    def finish_job(self, job: J) -> None:
        """Take the result of a job."""

    def run(self, jobs: Iterator[J]) -> int:
        """Work all of them off; returns the bytes read.

        Raises:
            whatever `finish_job` does.
        """
        threads = [threading.Thread(target=self._worker, name=f"checkpoint-{i}", daemon=True) for i in range(self._plan.workers)]
        # the caller's thread only waits: Ctrl-C must not come between the halves of what is done with a lock
        threads.append(threading.Thread(target=self._producer, args=(jobs,), name="checkpoint-blocks", daemon=True))
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # nothing may be told when this has returned
            self._stop = self._stop or error
            for thread in threads:
                thread.join()
        self._reads.close()
        if self._stop is not None:
            raise self._stop
        return self._reads.nbytes

    def _producer(self, jobs: Iterator[J]) -> None:
        try:
            for job in jobs:
                self._hand_out(job)
            self._flush()
            for _ in range(self._plan.workers):
                self._enqueue_blocks(None)
        except BaseException as error:  # `run` raises it in the caller's thread
            self._stop = self._stop or error

    def _hand_out(self, job: J) -> None:
        try:
            for block in job.blocks(self._plan.block_bytes):
                if job.trouble:
                    break
                job.one_more()
                self._batch.append((job, block))
                self._room -= max(block.numel, _BATCH_ELEMENTS // _BATCH)
                if self._room <= 0:
                    self._flush()
        except Unreadable as error:
            job.trouble = str(error)
        self._end_of_block(job)

    def _is_stopped(self) -> bool:
        return self._stop is not None

    def _flush(self) -> None:
        if self._batch:
            self._enqueue_blocks(self._batch)
            self._batch, self._room = [], _BATCH_ELEMENTS

    def _enqueue_blocks(self, item: list[tuple[J, Block]] | None) -> None:
        while self._stop is None:
            try:
                return self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue
        raise self._stop

    def _worker(self) -> None:
        try:
            rooms = [Room(self._plan.block_bytes) for _ in range(_ROOMS)]
            while self._stop is None:
                try:
                    batch = self._queue.get(timeout=0.2)
                except queue.Empty:
                    continue
                if batch is None:
                    return
                for job, block in batch:
                    if not job.trouble and not self._is_stopped():
                        try:
                            job.work(block, rooms, self._reads.mine())
                        except Unreadable as error:
                            job.trouble = str(error)
                    if not self._is_stopped():
                        self._end_of_block(job)
        except BaseException as error:  # `run` raises it in the caller's thread
            self._stop = self._stop or error

    def _end_of_block(self, job: J) -> None:
        if job.one_less():
            with self._lock:
                self.finish_job(job)
