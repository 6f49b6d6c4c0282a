"""A few threads that come when there is work and go when there is none."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from msprobe_engine.core.log import get_logger

IDLE_SECONDS = 10.0
_log = get_logger()
Job = TypeVar("Job")


class WriterPool(Generic[Job]):
    """Runs jobs, in the order in which they were put when there is one thread.

    Args:
        run: does one job; must not raise.
        threads: at most so many.
    """

    def __init__(self, run: Callable[[Job], None], threads: int) -> None:
        self._run = run
        self._most = threads
        self._threads = 0
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._said = self._failed = False

    def put(self, job: Job) -> None:
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
                self._do(self._queue.get_nowait())

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
                self._do(job)
                del job  # a thread that waits for the next one must not keep a step's records alive

    def _do(self, job: Job) -> None:
        """A fault must not end the thread: jobs that come later would wait for ever."""
        try:
            self._run(job)
        except Exception as error:
            if not self._failed:
                self._failed = True
                _log.error("tensor files lost data, training goes on: %s: %s", type(error).__name__, error)
