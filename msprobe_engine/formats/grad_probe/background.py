"""One thread that writes finished steps, with a bound on the memory that waits for it."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from msprobe_engine.core.guard import Faults

PATIENCE_SECONDS = 30.0
"""How long the training waits for memory, and the end of the run for files, while nothing at all is written (a hanging file system)."""
HINT = "later steps are tried again; what is lost is counted"


class Background:
    """Runs jobs in order on a daemon thread. A job that raises is counted in `lost` and said once.

    Args:
        faults: where failures go, under the part `part`.
        budget: bytes that may wait. One job that needs more than all of it has to be alone.
        patience: see `PATIENCE_SECONDS`.
    """

    def __init__(self, faults: Faults, part: str, budget: int, patience: float = PATIENCE_SECONDS) -> None:
        self.done = self.lost = 0
        self._faults, self._part = faults, part
        self._budget, self._patience = budget, patience
        self._held = 0
        self._freed = 0
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._process = os.getpid()

    def reserve(self, nbytes: int, own: int) -> bool:
        """Take memory from the budget for a job that has `own` bytes of it already; waits while other jobs have used it up. False when
        nothing came free in time."""
        with self._changed:
            while self._held > own and self._held + nbytes > self._budget:
                freed = self._freed
                if not self._changed.wait_for(lambda: self._freed != freed, self._patience):  # noqa: B023 - called before it changes
                    return False
            self._held += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Give memory back."""
        with self._changed:
            self._held -= nbytes
            self._freed += 1
            self._changed.notify_all()

    def give_up(self, nbytes: int, error: Exception) -> None:
        """A step is lost before it came here: count it, give its memory back.

        Raises:
            Exception: in strict mode, `error`.
        """
        self.lost += 1
        self.release(nbytes)
        self._faults.fail(self._part, error, disable=False, hint=HINT)

    def submit(self, job: Callable[[], None], nbytes: int) -> None:
        """Run `job` on the thread, then give its `nbytes` back.

        Raises:
            Exception: in strict mode, what an earlier job raised.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="msprobe-gradients", daemon=True)
            self._thread.start()
        self._jobs.put((job, nbytes))

    def close(self) -> None:
        """Wait until everything is written, as long as there is progress; end the thread.

        Raises:
            Exception: in strict mode, what a job raised.
        """
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._process:
            return
        self._jobs.put(None)
        before = -1
        while thread.is_alive() and before != self.done + self.lost:
            before = self.done + self.lost
            thread.join(self._patience)
        if thread.is_alive():
            error = TimeoutError(f"nothing was written for {self._patience:g} s, {self._jobs.qsize()} steps are not written")
            self._faults.fail(self._part, error, disable=False, hint="is the output file system hanging? the run does not wait for it")
        if self._error is not None:
            failed, self._error = self._error, None
            raise failed

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, nbytes = item
            try:
                job()
                self.done += 1
            except Exception as error:
                self.lost += 1
                try:
                    self._faults.fail(self._part, error, disable=False, hint=HINT)
                except Exception as strict:  # handed to the training thread at its next call
                    self._error = strict
            finally:
                del job, item
                self.release(nbytes)
