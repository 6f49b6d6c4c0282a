"""From observations to frames: collects a step, resolves its rows once, runs the rules, and passes the frame on.

Alerts on the console: one line for a cause. A NaN that spreads makes a thousand alerts in a step, and keeps making them in every step that
follows.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msprobe_engine.core import redaction
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.backend import Backend
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import FACTS, Entry, Frame, Sample, TensorRef
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.probe.pending_steps import PendingStep, RowsEdit, SaveFrame, StepSaver
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.writer import Writer

FrameListener = Callable[[Frame, Sequence[Alert]], None]

CLOSE_PATIENCE = 4.0
"""Seconds that `Pipeline.close` waits for the next edit to come, unless `Pipeline.patience` says otherwise."""


class Seen(NamedTuple):
    """What a step has shown so far; see `Pipeline.exchange`."""

    entries: list[Entry]
    samples: list[Sample]
    scalars: dict[str, TensorRef | float]
    edits: list[RowsEdit]
    lost: dict[str, int]
    level: str


class Pipeline:
    """One per probe. All methods are called on the training thread.

    Args:
        backend: where tensors are reduced.
        rules: alert rules, called at step boundaries.
        writer: receives every finished frame.
        listeners: called with each finished frame and its alerts, on the training thread (ring, incidents).

    Attributes:
        without_optimizer: of the parameters that are in no optimizer, how many there are and the name of the first; empty: none.
        untrained: parameters that the update of this step passes by, to why.
        doubtful: as of the `Frame` of this step.
        computed_in: data types that the training computes in, whatever is written, to where they were seen; empty: not known.
    """

    def __init__(
        self, backend: Backend, rules: Sequence[Rule], writer: Writer, faults: Faults, listeners: Sequence[FrameListener] = ()
    ) -> None:
        self.backend = backend
        self.rules = list(rules)
        self.writer = writer
        self.faults = faults
        self.listeners = list(listeners)
        self.entries: list[Entry] = []
        self.samples: list[Sample] = []
        self.level = ""
        self.lost: dict[str, int] = {}
        self._updated = -1
        self._edits: list[RowsEdit] = []
        self._scalars: dict[str, TensorRef | float] = {}
        self._waiting: list[PendingStep] = []
        self._saver = StepSaver(faults)
        self._advancing = False
        self._early: list[Alert] = []
        self._step_started = time.monotonic()
        self._announcer = Announcer()
        self.rank_info: dict[str, Any] = {}
        self.without_optimizer: dict[str, Any] = {}
        self.computed_in: dict[str, Any] = {}
        self.program: dict[str, Any] = {}
        self.untrained: dict[str, str] = {}
        self.doubtful: Mapping[str, str] = {}
        self.parallel: Mapping[str, Any] = {}
        self.cost = {"seconds": 0.0}
        self.patience = CLOSE_PATIENCE

    def sample(
        self,
        family: str,
        name: str,
        tensor: Any,
        *,
        phase: str = "",
        micro_step: int = -1,
        vpp_stage: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> TensorRef:
        """Start the reduction of one tensor and note it as a sample of this step. No wait."""
        ref = self.backend.reduce(tensor)
        self.samples.append(Sample(family, name, ref, phase, micro_step, vpp_stage, extra or {}))
        return ref

    def scalar(self, name: str, value: Any) -> None:
        """Note a number of this step; a tensor (0-dim or one element) is read at the step boundary, not now, and of a `TensorRef` it is
        the mean of the row. What is no number is left out and said once: it must not cost the step."""
        if isinstance(value, TensorRef):
            self._scalars[name] = value
        elif self.backend.is_tensor(value):
            self._scalars[name] = self.backend.reduce(value)
        elif value is not None:
            try:
                self._scalars[name] = float(value)
            except (TypeError, ValueError, OverflowError):
                self.lose(f"scalar {name}")
                problem = UsageError(f"end_step: {name!r} is a {type(value).__name__}; allowed: a number or a tensor with one element")
                self.faults.fail(f"scalar {name}", problem, disable=False, hint="give numbers to end_step")

    def read_scalar(self, name: str) -> TensorRef | float | None:
        """A number of this step as it was noted; None when there is none."""
        return self._scalars.get(name)

    def edit_rows(self, edit: RowsEdit) -> None:
        """Let `edit` change this step's rows once they are on the host."""
        self._edits.append(edit)

    def lose(self, reason: str, count: int = 1) -> None:
        """Count something that was observed and could not be kept."""
        self.lost[reason] = self.lost.get(reason, 0) + count

    def alert(self, alerts: Sequence[Alert]) -> None:
        """Note alerts of this step that were raised before its end. The step's own rules do not repeat them."""
        self._early.extend(alerts)

    def untold(self) -> list[Alert]:
        """Alerts that were noted after the last step's end: no frame takes them along any more. They are the caller's from now on."""
        left, self._early = self._early, []
        return left

    def exchange(self, seen: Seen | None = None) -> Seen:
        """Put what this step has shown so far aside and go on with `seen` (None: nothing). For a step that runs more than once;
        the caller does the same with the backend's rows."""
        new = seen or Seen([], [], {}, [], {}, self.level)
        old = Seen(self.entries, self.samples, self._scalars, self._edits, self.lost, self.level)
        self.entries, self.samples, self._scalars, self._edits, self.lost, self.level = new
        return old

    def mark_update(self) -> None:
        """The update of this step is done: forward calls from now on may be of the next step."""
        self._updated = len(self.entries)

    @property
    def empty(self) -> bool:
        """True when nothing was observed since the last step boundary."""
        return not (self.entries or self.samples or self._scalars)

    def end_step(self, step: int, stacks: list[list[str]] | None = None, complete: bool = True) -> None:
        """Close the current step: start the one copy, finish every step whose copy has arrived.

        Args:
            complete: False when the step was cut off.
        """
        now = time.monotonic()
        scalars, self._scalars = self._scalars, {}
        entries, self.entries = self.entries, []
        samples, self.samples = self.samples, []
        lost, self.lost = self.lost, {}
        updated, self._updated = self._updated, -1
        untrained, self.untrained = self.untrained, {}
        doubtful, self.doubtful = self.doubtful, {}
        edits, self._edits = self._edits, []
        early, self._early = self._early, []
        level, rank, parallel = self.level, self.backend.rank() or 0, self.parallel
        seconds, self._step_started = now - self._step_started, now
        framework = self.backend.framework
        pending = self.backend.finish_step()

        def build(rows: _rows.Rows, unknown: Mapping[int, str]) -> Frame:
            missing = Counter(lost)
            missing.update(unknown[s.ref.row] for s in samples if s.ref.row in unknown)
            numbers = {"step_seconds": seconds}
            for name, value in scalars.items():
                if isinstance(value, TensorRef):
                    if value.row < 0 or not _rows.is_written(rows[value.row]):
                        continue
                    numbers[name] = _mean(rows, value.row)
                else:
                    numbers[name] = value
            frame = Frame(
                step=step,
                rank=rank,
                rows=rows,
                entries=entries,
                samples=[s._replace(ref=s.ref._replace(row=-1)) if s.ref.row in unknown else s for s in samples] if unknown else samples,
                scalars=numbers,
                stacks=stacks or [],
                level=level,
                framework=framework,
                complete=complete and not unknown,
                lost=dict(missing),
                parallel=parallel,
                untrained=untrained,
                facts={name: numbers.pop(name) for name in FACTS & numbers.keys()},
                doubtful=doubtful,
                updated=updated,
            )
            return redaction.hide_frame(frame)

        self._waiting.append(PendingStep(pending, build, edits, early))
        self.advance()
        self.cost["seconds"] += time.monotonic() - now

    @property
    def waits(self) -> bool:
        """Has a step ended whose frame is not yet with the writer?"""
        return bool(self._waiting)

    def advance(self, wait: bool = False) -> None:
        """Finish the steps whose rows have arrived; with `wait`, all of them."""
        if self._advancing:
            return
        self._advancing = True
        until = time.monotonic() + self.patience if wait else 0.0
        try:
            while self._waiting:
                # rows of later steps go on their way while an earlier frame waits, in step order
                for step in self._waiting:
                    if not step.arrive(wait):
                        break
                head = self._waiting[0]
                if head.rows is None or not head.are_edits_ready(wait, until) or not head.lock.acquire(wait, self.patience if wait else -1):
                    return  # the last means that its frame is being saved
                if time.monotonic() < until:  # it came; one that was waited for in vain has used up the patience for all
                    until = time.monotonic() + self.patience
                del self._waiting[0]
                try:
                    head.make_frame(self.faults, self._saver.saves)
                finally:
                    head.lock.release()
                if head.error is not None:
                    raise head.error
                if head.frame is not None:
                    self._finish(head.frame, head.early)
                for action in head.then:
                    action()
        finally:
            self._advancing = False
            if self._waiting:
                self._saver.watch(self._waiting)

    def save_early(self, save: SaveFrame) -> None:
        """Call `save` with each frame as soon as it is there, before its alerts are known and on any thread, see `StepSaver`."""
        self._saver.saves.append(save)

    def afterwards(self, action: Callable[[], Any]) -> None:
        """Call `action` when the frames of all steps closed by now are with the writer: at once where none waits for its rows."""
        if self._waiting:
            self._waiting[-1].then.append(action)
        else:
            action()

    def close(self) -> None:
        """Finish all steps, flush and close the sinks."""
        self.advance(wait=True)
        self._saver.close()
        if self._waiting:
            self.writer.lose("steps that were still being saved", len(self._waiting))
        self.writer.close()

    def _finish(self, frame: Frame, early: Sequence[Alert] = ()) -> None:
        alerts: list[Alert] = list(early)
        known = {(alert.rule, alert.name) for alert in early}
        for rule in self.rules:
            part = f"rule {rule.name}"
            if self.faults.is_enabled(part):
                with self.faults.guard(part):
                    raised = rule.check(frame)
                    alerts.extend([each for each in raised if (each.rule, each.name) not in known] if known else raised)
        try:
            with self.faults.guard("writer"):
                self.writer.submit(frame, alerts)
                if self._announcer.will_say(alerts):
                    self.writer.wait_for_monitor()
        finally:  # a strict probe raises what a sink could not do
            self._announcer.report_alerts(alerts)
        for listener in self.listeners:
            with self.faults.guard(f"listener {getattr(listener, '__qualname__', listener)}"):
                listener(frame, alerts)


def _mean(rows: _rows.Rows, row: int) -> float:
    mean = _rows.read_row(rows[row]).mean
    return float("nan") if mean is None else float(mean)


_log = get_logger()

REPEAT_EVERY = 100
QUIET = 20
"""Steps, twice the interval of preset watch."""
_NOT_FINITE = frozenset(("nan_inf", "loss_not_finite"))
"""A NaN sets off both: one cause."""


class Announcer:
    """Says what the rules found.

    The first step with alerts of a rule shows one line: the first of them in the order of execution, and how many more there are. Then
    there is one line for every `REPEAT_EVERY` further steps. A step without alerts of the rule starts it anew; of numbers that are not
    finite, which stay so and are looked at every few steps, `QUIET` steps without do. Files and metrics hold every alert.
    """

    def __init__(self) -> None:
        self._running: dict[str, int] = {}
        self._quiet: dict[str, int] = {}  # cause -> steps since its last alert

    def will_say(self, alerts: Sequence[Alert]) -> bool:
        """Would `report_alerts` show a line of these?"""
        return any(_is_shown(self._running.get(cause, 0) + 1, of_cause) for cause, of_cause in _by_cause(alerts).items())

    def report_alerts(self, alerts: Sequence[Alert]) -> None:
        causes = _by_cause(alerts)
        self._quiet = {cause: 0 if cause in causes else self._quiet.get(cause, 0) + 1 for cause in {*self._running, *causes}}
        self._running = {cause: count for cause, count in self._running.items() if self._quiet[cause] <= (0 if cause else QUIET)}
        for cause, of_cause in causes.items():
            steps = self._running[cause] = self._running.get(cause, 0) + 1
            if not _is_shown(steps, of_cause):
                continue
            first = min(of_cause, key=lambda alert: (alert.order < 0, alert.order))
            level = logging.ERROR if any(alert.severity == "critical" for alert in of_cause) else logging.WARNING
            again = "" if steps == 1 or _is_over(of_cause) else f"{first.rule} goes on (every {REPEAT_EVERY} steps): "
            others = sum(alert.count for alert in of_cause if _is_over([alert]) == _is_over([first])) - first.count
            more = f" (and {others} more in step {first.step})" if others else ""
            _log.log(level, "ALERT %s%s%s", again, first.message, more)


def _by_cause(alerts: Sequence[Alert]) -> dict[str, list[Alert]]:
    """By rule; "" are those of numbers that are not finite."""
    causes: dict[str, list[Alert]] = {}
    for alert in alerts:
        causes.setdefault("" if alert.rule in _NOT_FINITE else alert.rule, []).append(alert)
    return causes


def _is_over(alerts: Sequence[Alert]) -> bool:
    return all(alert.extra.get("over") for alert in alerts)


def _is_shown(steps: int, alerts: Sequence[Alert]) -> bool:
    """Has this step with alerts of a cause, counted from 1, a line?"""
    return (steps - 1) % REPEAT_EVERY == 0 or _is_over(alerts)
