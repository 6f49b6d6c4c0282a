"""The background thread that hands finished frames to the sinks."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from msprobe_engine.guard import Faults
from msprobe_engine.log import get_logger
from msprobe_engine.records import Frame
from msprobe_engine.rules.base import Alert
from msprobe_engine.sinks.base import Sink
from msprobe_engine.sinks.filelimit import FileLimit

QUEUE_LENGTH = 64
"""Frames that may wait. A frame of 2000 tensors holds 256 KiB of rows."""
PATIENCE_SECONDS = 5.0
"""How long the training may be held back by a full queue (a hanging file system) before a frame is dropped and counted."""
CLOSE_SECONDS = 60.0
"""How long `flush` and `close` wait for the file system."""

_log = get_logger()


class Writer:
    """Writes frames in step order on one daemon thread.

    A sink that raises loses that frame only; the loss is counted per sink and said once. `lost` is what sinks that export
    metrics show.

    Args:
        file_limit: bytes for the files of sinks, see `msprobe_engine.sinks.filelimit`; 0: no limit.
    """

    def __init__(self, sinks: Sequence[Sink], faults: Faults, file_limit: int = 0) -> None:
        self.sinks = list(sinks)
        self._file_limit = FileLimit(file_limit, self.sinks)
        self.lost: dict[str, int] = {}
        self._faults = faults
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_LENGTH)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._error: BaseException | None = None

    def submit(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Queue one frame. Waits at most `PATIENCE_SECONDS` when the queue is full, then drops the frame and counts it."""
        if self.sinks:
            self.call(lambda: self._write(frame, alerts), f"frame of step {frame.step}")

    def call(self, job: Callable[[], None], what: str) -> None:
        """Run `job` on the writer thread, after everything that was queued before."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if os.getpid() != self._process:  # a forked child: the thread, and whoever held the queue's lock, stayed in the parent
            self._process, self._queue, self._thread = os.getpid(), queue.Queue(QUEUE_LENGTH), None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="msprobe-writer", daemon=True)
            self._thread.start()
        try:
            self._queue.put(job, timeout=PATIENCE_SECONDS)
        except queue.Full:
            self.lose("writer queue")
            error = TimeoutError(f"{what} dropped: {QUEUE_LENGTH} frames are waiting and nothing was written for {PATIENCE_SECONDS:g} s")
            self._faults.fail("writer queue", error, disable=False, hint="is the output file system hanging? dropped frames are counted")

    def flush(self) -> None:
        """Wait until everything queued so far is written, at most `CLOSE_SECONDS`."""
        if self._thread is None or os.getpid() != self._process:
            return
        for sink in self.sinks:
            if (drain := getattr(sink, "drain", None)) is not None:  # tensor files: minutes of work are no hanging file system
                drain()
        done = threading.Event()
        until = time.monotonic() + CLOSE_SECONDS
        try:
            self._queue.put(done.set, timeout=CLOSE_SECONDS)
            while not (written := done.wait(min(1.0, max(0.0, until - time.monotonic())))):
                if time.monotonic() >= until or not self._thread.is_alive():
                    break
        except queue.Full:
            written = False
        if not written:
            self.lose("writer queue")
            error = TimeoutError(f"{self._queue.qsize()} frames were not written within {CLOSE_SECONDS:g} s")
            self._faults.fail("writer queue", error, disable=False, hint="is the output file system hanging? the run does not wait for it")
            return
        for sink in self.sinks:
            try:
                sink.flush()
            except Exception as error:
                self._fail(sink, error)

    def close(self) -> None:
        """Flush and close all sinks, end the thread."""
        self.flush()
        if self._thread is not None and os.getpid() == self._process:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
                self._thread.join(timeout=PATIENCE_SECONDS)
        self._thread = None
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                self._fail(sink, error)
        self._file_limit.close()
        if self.lost:
            _log.error("lost while writing: %s", ", ".join(f"{name} {count}" for name, count in sorted(self.lost.items())))

    def lose(self, name: str, count: int = 1) -> None:
        """Count what was lost: frames, or tensors."""
        self.lost[name] = self.lost.get(name, 0) + count

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except BaseException as error:  # strict mode: handed to the training thread at its next call
                self._error = error

    def _write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        for_files = self._file_limit.shorten(frame, alerts)
        for sink in self.sinks:
            given = for_files if hasattr(sink, "size") else frame
            try:
                if given is not None:
                    sink.write(given, alerts)
            except Exception as error:
                self._fail(sink, error)

    def _fail(self, sink: Sink, error: Exception) -> None:
        self.lose(sink.name)
        self._faults.fail(f"sink {sink.name}", error, disable=False, hint="later steps are tried again; what is lost is counted")
