"""Steps that are over and no frames yet: their rows are on their way to the host, or wait for those of other ranks.

Frames are made at step boundaries, on the training's thread. Rows that are merged over ranks arrive a few milliseconds after the boundary
at which they were sent, so a process that is killed within the next step would lose a step that was finished long ago. For what saves
frames at once (the frame log of a dump) a thread therefore makes the frame as soon as all rows are there; rules, listeners and sinks get
that same frame from the training's thread, as ever. Rows that other ranks keep back for longer than `PATIENCE_SECONDS` are not waited for:
until they come the step is saved without what they would tell, and says so (`Frame.lost`, `Frame.complete`).
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.backend import PendingRows
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Frame
from msprobe_engine.core.statistics import rows as _rows

BuildFrame = Callable[[_rows.Rows, Mapping[int, str]], Frame]
"""(rows, those without numbers) -> the frame; may be called twice."""
SaveFrame = Callable[[Frame], None]

PATIENCE_SECONDS = 1.0
"""Seconds after which a step is saved without what its edits wait for."""
PART = "saving of finished steps"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02


class RowsEdit(ABC):
    """Changes the rows of a step after they have arrived, on any thread: used to put merged rows of several ranks in place of local ones.
    The frame waits for it and the training does not.

    Attributes:
        unknown: after `apply`: rows that have no numbers, each with the reason under which the frame counts it as lost.
    """

    unknown: Mapping[int, str] = MappingProxyType({})

    def start(self, rows: _rows.Rows) -> None:
        """Called once when the rows are on the host; returns at once and never raises."""

    def ready(self) -> bool:
        """True when `apply` will not wait; asked on any thread until it says so."""
        return True

    def wait(self, seconds: float) -> None:
        """Wait until ready, at most so long; called at the end of the run."""

    def leave_out(self, rows: _rows.Rows) -> Mapping[int, str] | None:
        """Before it is ready: take the numbers out of rows that are a copy; what `unknown` is then. None: nothing can be said of the step
        until it is ready."""
        del rows
        return None

    @abstractmethod
    def apply(self, rows: _rows.Rows) -> None:
        """Change the rows, once."""


class ChangedRows(RowsEdit):
    """A function that changes the rows and waits for nothing."""

    def __init__(self, change: Callable[[_rows.Rows], None]) -> None:
        self._change = change

    def apply(self, rows: _rows.Rows) -> None:
        self._change(rows)


class PendingStep:
    """One step.

    Attributes:
        lock: held by the thread that makes its frame or saves it.
        frame: once it is made.
        error: what was raised instead (strict).
        then: to be called when the frame is with the writer.
    """

    __slots__ = ("arrived", "build", "early", "edits", "error", "frame", "lock", "pending", "rows", "saved", "then", "watched")

    def __init__(self, pending: PendingRows, build: BuildFrame, edits: Sequence[RowsEdit], early: Sequence[Alert] = ()) -> None:
        self.pending = pending
        self.build = build
        self.edits = edits
        self.early = early
        self.rows: _rows.Rows | None = None
        self.arrived = 0.0
        self.saved = self.watched = False
        self.then: list[Callable[[], Any]] = []
        self.lock = threading.Lock()
        self.frame: Frame | None = None
        self.error: Exception | None = None

    def arrive(self, wait: bool) -> bool:
        """Take the rows over if they are there; True when they are. On the training's thread only, which knows the device."""
        if self.rows is None:
            if not (wait or self.pending.ready()):
                return False
            rows = self.pending.rows()
            for edit in self.edits:
                edit.start(rows)
            self.rows, self.arrived = rows, time.monotonic()
        return True

    def are_edits_ready(self, wait: bool, until: float) -> bool:
        """True when every edit can be called without a wait, or has been waited for until then."""
        for edit in self.edits:
            if wait:
                edit.wait(max(0.0, until - time.monotonic()))
            elif not edit.ready():
                return False
        return True

    def make_frame(self, faults: Faults, saves: Sequence[SaveFrame]) -> None:
        """Edit the rows, build the frame and save it, once. The caller has the lock."""
        if self.frame is not None or self.error is not None:
            return
        assert self.rows is not None
        unknown: dict[int, str] = {}
        try:
            for edit in self.edits:
                with faults.guard("merge over ranks"):
                    edit.apply(self.rows)
                unknown.update(edit.unknown)
            frame = self.build(self.rows, unknown)
            _save(frame, faults, saves)
            self.frame = frame
        except Exception as error:
            self.error = error

    def save_own_rows(self, faults: Faults, saves: Sequence[SaveFrame]) -> None:
        """Save the step with what is known by now. The caller has the lock."""
        if self.saved or self.frame is not None or self.error is not None:
            return
        self.saved = True
        assert self.rows is not None
        rows = self.rows.copy()
        unknown: dict[int, str] = {}
        for edit in self.edits:
            if edit.ready():
                with faults.guard("merge over ranks"):
                    edit.apply(rows)
                unknown.update(edit.unknown)
            elif (left := edit.leave_out(rows)) is not None:
                unknown.update(left)
            else:
                return
        _save(self.build(rows, unknown), faults, saves)


class StepSaver:
    """Makes and saves frames of pending steps on a thread of its own, which exists only where there is something to save and to wait for.

    Attributes:
        saves: called with each frame as soon as it is there, before its alerts are known and on any thread; before that perhaps with
            another frame of the same step that lacks what other ranks would tell.
    """

    def __init__(self, faults: Faults) -> None:
        self.saves: list[SaveFrame] = []
        self._faults = faults
        self._steps: deque[PendingStep] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._error: Exception | None = None

    def watch(self, steps: Sequence[PendingStep]) -> None:
        """Save these steps as soon as that is possible: all that wait, in order. Does not wait."""
        if not self.saves or not self._faults.is_enabled(PART):
            return
        if self._error is not None:
            error, self._error = self._error, None
            self._faults.fail(PART, error)
            return
        if os.getpid() != self._process:  # a forked child: the thread stayed in the parent
            self._process, self._steps, self._wake, self._thread = os.getpid(), deque(), threading.Event(), None
        for step in steps:
            if step.rows is not None and not step.watched:
                step.watched = True
                self._steps.append(step)
        if self._steps and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="msprobe-step-saver", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """End the thread; does not wait for it."""
        self._thread = None
        self._wake.set()

    def _run(self) -> None:
        try:
            while self._thread is threading.current_thread():
                self._wake.wait()
                self._wake.clear()
                pause = _FIRST_PAUSE
                while self._steps and self._thread is threading.current_thread():
                    if self._advance():
                        pause = _FIRST_PAUSE
                    else:
                        time.sleep(pause)
                        pause = min(2 * pause, _LONGEST_PAUSE)
        except Exception as error:
            self._steps.clear()
            self._error = error  # said on the training's thread

    def _advance(self) -> bool:
        """Save what can be saved; True when the first step needs no more care."""
        first = self._steps[0]
        if first.frame is None and first.error is None:
            if first.are_edits_ready(wait=False, until=0.0):
                with first.lock:
                    first.make_frame(self._faults, self.saves)
            else:
                late = time.monotonic() - PATIENCE_SECONDS
                for step in list(self._steps):
                    if not step.saved and step.arrived < late:
                        with step.lock:
                            step.save_own_rows(self._faults, self.saves)
                return False
        self._steps.popleft()
        return True


def _save(frame: Frame, faults: Faults, saves: Sequence[SaveFrame]) -> None:
    for save in saves:
        with faults.guard(f"listener {getattr(save, '__qualname__', save)}"):
            save(frame)
