"""The background threads that hand finished frames to the sinks: one for what the monitor writes, one for dumps.

A step of a dump is hundreds of kilobytes of text, or gigabytes of tensors, and one of the monitor a few lines. Behind one queue the monitor
would wait for the dump, and a process that is killed would lose steps of it that were finished long ago.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.guard import Faults, suppress_faults
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame
from msprobe_engine.formats.loss_causes import DELETED, SLOW, cause_of
from msprobe_engine.formats.monitor.losses import Loss, Losses, LossFile
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.file_limit import FileLimit

QUEUE_LENGTH = 64
"""Frames that may wait in one queue. A frame of 2000 tensors holds 256 KiB of rows; both queues hold the same ones."""
PATIENCE_SECONDS = 5.0
"""How long the training may be held back by full queues (a hanging file system) before a frame is dropped and counted."""
AWAY_SECONDS = 5.0
"""How long the files of a sink must have been deleted before they are made again, and how often it is looked for: thousands of ranks would
ask a shared file system in each step. What went there in between is counted as gone with the rest."""
CLOSE_SECONDS = 60.0
"""How long `flush` and `close` wait for the file system."""

_log = get_logger()
_HANGS = "is the output file system hanging?"


class Lose(Protocol):
    """Counts what a sink has lost."""

    def __call__(self, name: str, count: int = 1, /) -> None: ...


class SinkQueue:
    """Writes frames in step order on one daemon thread, for some of the sinks.

    Args:
        name: of the queue, in messages and in `Writer.lost`.
        sinks: may be changed while nothing waits to be written, and appended to at any time.
        faults, lose: what tells of failures, and counts what is lost.
        losses: what tells those who read the files.
        of_dumps: the sinks write dumps, and a frame without records is no step of theirs.
        file_limit: bytes for the files of these sinks, see `msprobe_engine.probe.sinks.file_limit`; 0: no limit.
    """

    def __init__(
        self,
        name: str,
        sinks: Sequence[Sink],
        faults: Faults,
        lose: Lose,
        losses: Losses,
        *,
        of_dumps: bool = False,
        file_limit: int = 0,
    ) -> None:
        self.name = name
        self.sinks = list(sinks)
        self._file_limit = FileLimit(file_limit, self.sinks)
        self._faults = faults
        self._lose = lose
        self._losses = losses
        self._of_dumps = of_dumps
        self._kept: dict[str, Loss] = {}
        """What each sink has written: lost when its files are deleted."""
        self._gone_since: dict[str, float] = {}
        self._looked: dict[str, float] = {}
        """Sinks whose files are deleted, and when that was seen."""
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_LENGTH)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._error: Exception | None = None

    def submit(self, frame: Frame, alerts: Sequence[Alert], until: float) -> None:
        """Queue one frame. Waits at most `until` (of the monotonic clock) when the queue is full, then drops the frame and counts it."""
        for sink in self.sinks:
            sink.prepare()
        if self.sinks and not self.call(lambda: self._write(frame, alerts), f"frame of step {frame.step}", until):
            for sink in self.sinks:
                self._count_loss(sink, frame, alerts, SLOW)

    def call(self, job: Callable[[], None], what: str, until: float) -> bool:
        """Run `job` on the thread of this queue, after everything that was queued before; False when there was no room for it in time."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if os.getpid() != self._process:  # a forked child: the thread, and whoever held the queue's lock, stayed in the parent
            self._process, self._queue, self._thread = os.getpid(), queue.Queue(QUEUE_LENGTH), None
            self._losses.take_over()
        self._need_thread()
        began = time.monotonic()
        try:
            self._queue.put(job, timeout=max(0.0, until - began))
        except queue.Full:
            self._lose(self.name)
            waited = time.monotonic() - began
            problem = TimeoutError(f"{what} dropped: {QUEUE_LENGTH} frames are waiting and nothing was written for {waited:.2g} s")
            self._faults.fail(self.name, problem, disable=False, hint=f"{_HANGS} dropped frames are counted")
            return False
        return True

    @property
    def _works(self) -> bool:
        return self._thread is not None and os.getpid() == self._process

    def _need_thread(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        if self._thread is not None:
            self._lose(self.name)
            problem = RuntimeError("the thread that writes files has ended in the midst of a frame; another one goes on with the next")
            self._faults.fail(self.name, problem, disable=False, hint="what is lost is counted")
        thread = threading.Thread(target=self._run, name=f"msprobe-{self.name.replace(' ', '-')}", daemon=True)
        thread.start()
        self._thread = thread

    def wait_for_sinks(self, seconds: float) -> bool:
        """Wait until the sinks have been given everything that was queued so far, at most so many seconds; False: they have not."""
        if not self._works:
            return True
        flushed = threading.Event()
        until = time.monotonic() + seconds
        written = False
        with contextlib.suppress(queue.Full, RuntimeError):  # at the end of the interpreter no thread can be started
            self._need_thread()
            assert self._thread is not None
            self._queue.put(flushed.set, timeout=seconds)
            while not (written := flushed.wait(min(1.0, max(0.0, until - time.monotonic())))):
                if time.monotonic() >= until or not self._thread.is_alive():
                    break
        return written

    def flush(self, seconds: float) -> None:
        """Wait until everything queued so far is written, at most so many seconds."""
        if not self._works:
            return
        began = time.monotonic()
        if not self.wait_for_sinks(seconds):
            self._lose(self.name)
            alive = self._thread is not None and self._thread.is_alive()
            why = f"{_HANGS} the run does not wait for it" if alive else "the thread that writes files has ended"
            problem = TimeoutError(f"{self._queue.qsize()} frames were not written within {time.monotonic() - began:.2g} s")
            self._faults.fail(self.name, problem, disable=False, hint=why)
            return
        for sink in self.sinks:
            try:
                sink.flush()
            except Exception as error:
                self._fail(sink, error)

    def close(self) -> None:
        """End the thread and close the sinks; what still waits is not waited for."""
        if self._works:
            assert self._thread is not None
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
                self._thread.join(timeout=PATIENCE_SECONDS)
        self._thread = None
        for sink in self.sinks:
            with suppress_faults():  # a strict probe raises
                self._keep_place(sink, at_once=True)
        self._losses.write_losses()
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                self._fail(sink, error)
        self._file_limit.close()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception as error:  # strict mode: handed to the training thread at its next call
                self._error = error

    def _write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        for_files = self._file_limit.shorten(frame, alerts)
        for sink in self.sinks:
            given = for_files if sink.size is not None else frame
            try:
                if given is not None:
                    self._keep_place(sink)
                    if given.samples and not sink.tensors:
                        given = replace(given, samples=[], elsewhere=True)
                    sink.write(given, alerts)
                    if sink.home is not None:
                        self._kept[sink.name] = Loss(1, frame.step, frame.step, len(alerts)).plus(self._kept.get(sink.name))
            except Exception as error:
                self._count_loss(sink, frame, alerts, cause_of(error))
                self._losses.write_losses()  # before a strict probe raises
                self._fail(sink, error)
        self._losses.write_losses()

    def _keep_place(self, sink: Sink, *, at_once: bool = False) -> None:
        """Where the files of a sink were deleted in the midst of the run, make them again: who reads them hears what is gone. Not at once:
        who deletes a directory finds it in his way when files come into it meanwhile, and that may be the training."""
        now = time.monotonic()
        looks = at_once or sink.name in self._gone_since or now >= self._looked.get(sink.name, -math.inf) + AWAY_SECONDS
        if sink.home is None or not looks:
            return
        self._looked[sink.name] = now
        if not _is_gone(sink.home):
            self._gone_since.pop(sink.name, None)
            return
        if sink.name not in self._gone_since:
            self._gone_since[sink.name] = now
            self._say_gone(sink)
        if now - self._gone_since[sink.name] < AWAY_SECONDS and not at_once:
            return
        try:
            sink.make_again()
        except SinkError as error:  # what is open may have been moved away and take more; else `write` says that it is gone
            _log.debug("%s is gone and cannot be made again: %s", sink.home, error)
            return
        if (gone := self._kept.pop(sink.name, None)) is not None:
            self._losses.add_loss(sink.name, gone._replace(why=DELETED))
            self._lose(sink.name, gone.steps)

    def _say_gone(self, sink: Sink) -> None:
        gone, part = self._kept.get(sink.name), f"sink {sink.name}"
        steps = f"; steps {gone.first} to {gone.last} went with it" if gone else ""
        what = f"{sink.home} was deleted or moved away while the run wrote it{steps}"
        hint = "it will be made again, and later steps go there; what is lost is counted"
        if self._faults.counts.get(part):  # of something else
            _log.error("%s: %s (%s)", part, what, hint)
        else:
            self._faults.fail(part, SinkError(what), disable=False, hint=hint)

    def _count_loss(self, sink: Sink, frame: Frame, alerts: Sequence[Alert], why: str) -> None:
        if sink.losses is not None or (self._of_dumps and frame.entries):
            self._losses.add_loss(sink.name, Loss(1, frame.step, frame.step, len(alerts), why))

    def _fail(self, sink: Sink, error: Exception) -> None:
        self._lose(sink.name)
        self._faults.fail(f"sink {sink.name}", error, disable=False, hint="later steps are tried again; what is lost is counted")


def _is_gone(path: Path) -> bool:
    """Nothing is there. Where that cannot be seen (no permission, a file system that fails), what is open may still take more."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
    return False


class Writer:
    """Hands every frame to the sinks of both queues.

    A sink that raises loses that frame only; the loss is counted per sink and said once.

    Args:
        file_limit: bytes for their files, see `msprobe_engine.probe.sinks.file_limit`; 0: no limit.

    Attributes:
        dump_sinks: those that write dumps. Either list may be changed while nothing waits to be written, and appended to at any time.
        lost: what was lost, name to count; what sinks that export metrics show.
    """

    def __init__(self, sinks: Sequence[Sink], faults: Faults, file_limit: int = 0) -> None:
        self.lost: dict[str, int] = {}
        self._losing = threading.Lock()
        losses = Losses(self._loss_files)
        self._monitor = SinkQueue("writer queue", sinks, faults, self.lose, losses, file_limit=file_limit)
        self._dump = SinkQueue("dump queue", [], faults, self.lose, losses, of_dumps=True)
        self.sinks, self.dump_sinks = self._monitor.sinks, self._dump.sinks

    def submit(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Queue one frame for all sinks. Waits at most `PATIENCE_SECONDS`, for both queues together."""
        until = time.monotonic() + PATIENCE_SECONDS
        self._monitor.submit(frame, alerts, until)
        self._dump.submit(frame, alerts, until)

    def wait_for_monitor(self) -> None:
        """Wait until the monitor's files have every frame that was queued so far, at most `PATIENCE_SECONDS`: an alert is on the disk
        before people read it, so that no process can be killed between the two."""
        self._monitor.wait_for_sinks(PATIENCE_SECONDS)

    def call(self, job: Callable[[], None], what: str) -> None:
        """Run `job` on the thread of the monitor's sinks, after every frame that was queued before."""
        self._monitor.call(job, what, time.monotonic() + PATIENCE_SECONDS)

    def call_dump(self, job: Callable[[], None], what: str) -> None:
        """The same on the thread that writes dumps: for what takes as long as they do."""
        self._dump.call(job, what, time.monotonic() + PATIENCE_SECONDS)

    def flush(self) -> None:
        """Wait until everything queued so far is written, at most `CLOSE_SECONDS` for both queues together, where no tensors are on their
        way to files. The monitor's files, which take moments, come first; the dump's thread goes on meanwhile."""
        began = time.monotonic()
        self._monitor.flush(CLOSE_SECONDS)
        left = max(began + CLOSE_SECONDS - time.monotonic(), CLOSE_SECONDS / 60)
        for sink in self.dump_sinks:
            sink.drain()  # tensor files: minutes of work are no hanging file system
        self._dump.flush(left)

    def close(self) -> None:
        """Flush and close all sinks, end the threads."""
        self.flush()
        self._monitor.close()
        self._dump.close()
        if self.lost:
            _log.error("lost while writing: %s", ", ".join(f"{name} {count}" for name, count in sorted(self.lost.items())))

    def _loss_files(self) -> list[LossFile]:
        return [sink.losses for sink in self.sinks if sink.losses is not None]

    def lose(self, name: str, count: int = 1, /) -> None:
        """Count what was lost: frames, or tensors. Called on any thread."""
        with self._losing:
            self.lost[name] = self.lost.get(name, 0) + count
