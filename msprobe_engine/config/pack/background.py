"""Entries are written by a thread: a training does not wait for a disk, or for the other ranks' turn at the pack."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.log import error

_WAITING = 64
"""Submissions that may wait for the thread; the next one waits for it."""
_alive: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


class BackgroundWriter:
    """Writes what is submitted, in order. A fault is said once, and what comes after it is dropped: nothing raises into the training."""

    def __init__(self, writer: PackWriter) -> None:
        self.writer = writer
        self.failed = False
        self._queue: queue.Queue[Callable[[], Mapping[str, Any]] | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        _alive.add(self)

    def submit(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Write the entries that ``make()`` gives, in the thread."""
        if self.failed or os.getpid() != self._pid:
            return
        if self._thread is None:

            def work() -> None:
                try:
                    self._run()
                except Exception as fault:  # a bug of ours, which would end the thread without a word
                    self._fail(fault)

            self._thread = threading.Thread(target=work, name="msprobe config check", daemon=True)
            self._thread.start()
        self._queue.put(make)

    def flush(self, patience: float | None = None) -> bool:
        """Wait until everything that was submitted is written, `patience` seconds at most. Returns whether it is."""
        if self._thread is None or os.getpid() != self._pid:
            return True
        until = None if patience is None else time.monotonic() + patience
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks:
                left = None if until is None else until - time.monotonic()
                if (left is not None and left <= 0) or not self._thread.is_alive():
                    return False
                self._queue.all_tasks_done.wait(1.0 if left is None else min(left, 1.0))
        return True

    def close(self, patience: float | None = None) -> None:
        """Write what is left, and end the thread."""
        if self._thread is None or os.getpid() != self._pid:
            return
        if self.flush(patience):
            self._queue.put(None)
            self._thread.join(patience)
            self._thread = None

    def _run(self) -> None:
        while True:
            make = self._queue.get()
            try:
                if make is None:
                    return
                if not self.failed:
                    self.writer.add(make())
            except Exception as fault:
                self._fail(fault)
            finally:
                self._queue.task_done()

    def _fail(self, fault: Exception) -> None:
        self.failed = True
        kind = "" if isinstance(fault, ProbeError) else f"{type(fault).__name__}: "
        error(f"config check: nothing more is collected, the training goes on: {kind}{fault}")


def flush_all() -> None:
    """Wait for all packs that this process is writing."""
    for one in list(_alive):
        one.flush()
