"""Rule ``stalled``: no step ends any more. Seen by a thread of its own, because the training does not come by."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.rules.alert_factory import number, over_alert
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.stateful_rule import LastingRule

_log = get_logger()

STACK_LINES = 30
"""Lines of the training's stack that the alert holds, innermost last."""


@dataclass(frozen=True, kw_only=True)
class StalledArgs(LastingArgs):
    factor: float = arg(10.0, "fires after so many times the median time of a step", above=1.0)
    minimum: float = arg(60.0, "and at least so many seconds", above=0.0)
    warmup: int = arg(5, "steps seen before the rule may fire; the first ones compile and load", minimum=2)


class StalledRule(LastingRule[StalledArgs]):
    """One warning when no step has ended for `factor` times the median step, with the stack of the training thread; one more alert when
    steps go on.

    The alert does not wait for a step: it goes to whoever was given to `bind`.
    """

    name = "stalled"
    fires = "no step has ended for `factor` times the median time of a step"
    meaning = "A rank waits: a hanging collective, a slow or dead neighbour, storage or the data loader."
    next = "the stack in the alert says where this rank waits; the rank whose stack is elsewhere is the one the others wait for"
    all_kinds = ("step",)
    args_type = StalledArgs

    def setup(self) -> None:
        self._seconds: deque[float] = deque(maxlen=51)
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._step = -1
        self._rank = 0
        self._said = 0.0
        self._held = False
        self._outlet: Callable[[Alert], None] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._training = 0
        self._process = 0

    def bind(self, outlet: Callable[[Alert], None]) -> None:
        """Alerts of the watching thread go to `outlet`, on that thread."""
        self._outlet = outlet

    def hold(self, held: bool) -> None:
        """Evaluation begins or is over: no step is expected meanwhile, and that time counts for none."""
        with self._lock:
            self._held, self._last = held, time.monotonic()

    def close(self) -> None:
        """End the watching thread."""
        self._stop.set()
        if self._thread is not None and self._process == os.getpid():
            self._thread.join(timeout=1.0)
        self._thread = None

    def check(self, frame: Frame) -> list[Alert]:
        """A step has ended. Says so when the steps had stalled."""
        now = time.monotonic()
        with self._lock:
            self._seconds.append(now - self._last)
            waited, self._last, self._step, self._rank = now - self._last, now, frame.step, frame.rank
            said, self._said = self._said, 0.0
        self._training = threading.get_ident()
        if self._process != os.getpid() and self._outlet is not None and not self._stop.is_set():
            # A thread does not survive a fork.
            self._process = os.getpid()
            self._thread = threading.Thread(target=self._watch, name="msprobe-stalled", daemon=True)
            self._thread.start()
        if not said:
            return []
        alert = over_alert(frame, "steps", "step", rule=self.name, steps=1)
        message = f"{self.name}: rank {frame.rank} step {frame.step}: steps go on, after {waited:.0f} s"
        return [Alert(**{**vars(alert), "value": waited, "message": message})]

    def overdue(self, now: float) -> Alert | None:
        """The alert, when at the time `now` (monotonic seconds) the next step is overdue and that was not said yet."""
        with self._lock:
            if self._said or self._held or len(self._seconds) < self.args.warmup:
                return None
            median = float(np.median(np.array(self._seconds)))
            waited = now - self._last
            limit = max(self.args.factor * median, self.args.minimum)
            if waited <= limit:
                return None
            self._said, step, rank = now, self._step, self._rank
        frame = sys._current_frames().get(self._training)
        stack = [line.rstrip() for line in traceback.format_stack(frame)][-STACK_LINES:] if frame is not None else []
        where = stack[-1].strip().splitlines()[0] if stack else "unknown"
        return Alert(
            rule=self.name,
            severity=self.severity,
            kind="step",
            name="steps",
            step=step + 1,
            rank=rank,
            value=waited,
            expected=f"a step within {number(limit)} s",
            message=f"{self.name}: rank {rank}: no step has ended for {waited:.0f} s after step {step} (median {number(median)} s); "
            f"it waits in {where}",
            extra={"stack": stack, **self.words},
        )

    def _watch(self) -> None:
        period = min(max(self.args.minimum / 10.0, 0.02), 5.0)
        while not self._stop.wait(period):
            try:
                alert = self.overdue(time.monotonic())
                if alert is not None and self._outlet is not None:
                    self._outlet(alert)
            except Exception as error:
                _log.warning("rule stalled stops to watch, training goes on: %s: %s", type(error).__name__, error)
                return
