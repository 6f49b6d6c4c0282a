"""Alert, then capture: keeps the ring, starts and joins incidents, says what to capture."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import ProbeError, UsageError
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.io.regular_files import explain
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import IncidentSettings, OnAlertSettings
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.incident.merge import merge_if_behind
from msprobe_engine.probe.incident.notify import Notifier
from msprobe_engine.probe.incident.on_alert import act_once
from msprobe_engine.probe.incident.writer import Capture, write_incident

_log = logging.getLogger("msprobe")


@dataclass(frozen=True)
class CaptureRequest:
    """What the probe is asked to dump.

    Attributes:
        level: L0, L1 or mix.
        first_step: first step to dump; always after the step that has just ended.
        steps: how many.
        directory: root to dump into (``step<N>/rank<R>/`` below it): the incident directory.
        late: the other ranks agreed on an earlier step than this one.
    """

    level: str
    first_step: int
    steps: int
    directory: Path
    late: bool = False

    def wants(self, step: int) -> bool:
        """Is `step` one of those to dump?"""
        return self.first_step <= step < self.first_step + self.steps


def _is_broken(frame: Frame) -> bool:
    """The loss is no number: nothing that comes now is of another cause."""
    return any("loss" in name and not math.isfinite(value) for name, value in frame.scalars.items())


@dataclass
class _Tended:
    """An incident that this rank looks after: `step` is when it looks next, `pause` how many steps later it looks then."""

    directory: Path
    step: int
    pause: int = 1


_LONGEST_PAUSE = 64
"""Steps; whoever has not finished its file of an incident by then is dead."""

_LATER = 4
"""Steps between the first looks of two successors."""


def successors(announcer: int, world_size: int) -> list[int]:
    """Who looks after an incident, in turn: the rank that has announced it, then 0, 1, 2, 4, 8, ..., so that they are on several nodes."""
    others = [0, *(1 << n for n in range(world_size.bit_length()))]
    return [announcer, *(rank for rank in others if rank < world_size and rank != announcer)]


Submit = Callable[[Callable[[], None], str], None]
"""Runs a job later on the thread that writes dumps: `msprobe_engine.probe.writer.Writer.call_dump`."""


class IncidentManager:
    """One per process. `on_frame` is a frame listener of the pipeline, called on the training thread at step boundaries.

    Args:
        settings: section ``incident`` of the settings.
        output_dir: root of the run's output; used when ``incident.path`` is empty.
        notifier: carries events between ranks; closed by `close`.
        submit: where the writing is done; default: at once, on the calling thread.
        rank_info: where the rank is (``pp``, ``tp``, ``dp``, ...), as far as is known by the time something is written.
        on_alert: what is done when an incident begins.
    """

    def __init__(
        self,
        settings: IncidentSettings,
        *,
        output_dir: Path,
        rank: int,
        world_size: int,
        notifier: Notifier,
        submit: Submit | None = None,
        rank_info: Mapping[str, Any] | None = None,
        on_alert: OnAlertSettings | None = None,
    ) -> None:
        self.settings = settings
        self._on_alert = on_alert
        self._rank_info = rank_info if rank_info is not None else {}
        self.directory = Path(settings.path) if settings.path else Path(output_dir) / "incidents"
        self.rank = rank
        self.world_size = world_size
        self.notifier = notifier
        self.ring = Ring(settings.ring_steps)
        self.incidents: dict[str, Event] = {}
        self.requests: list[CaptureRequest] = []
        self.suppressed = 0
        self.lost = 0
        self._submit = submit or (lambda job, _what: job())
        self._full = False
        self._grave = 0
        self._waiting: list[tuple[Event, Capture | None]] = []
        self._tended: list[_Tended] = []
        self._old = {path.name for path in self.directory.iterdir()} if self.directory.is_dir() else set()

    def on_frame(self, frame: Frame, alerts: Sequence[Alert], now: int | None = None) -> CaptureRequest | None:
        """Keep the frame, hear of other ranks' incidents, start one for an alert that is grave enough.

        Args:
            frame: the frame that has just been finished.
            alerts: what the rules say about it.
            now: the last step that has ended on this rank, when frames arrive late; default: the frame's step.

        Returns:
            What to capture, when an incident began with this call. It is also kept in `requests`.
        """
        if not self.settings.enabled:
            return None
        self.ring.append(frame)
        now = frame.step if now is None else max(now, frame.step)
        for event, capture in [item for item in self._waiting if item[0].step <= frame.step]:
            self._waiting.remove((event, capture))
            self._write(event, self.ring.frames(), [alert for alert in alerts if alert.step == event.step], capture)
        self._tend(now)
        request: CaptureRequest | None = None
        for value in self.notifier.poll():
            try:
                event = Event.from_json(value)
            except ProbeError as error:
                _log.warning("%s; ignored", error)
                continue
            if event.id not in self.incidents and self._room():
                own = [alert for alert in alerts if alert.step == event.step]
                request = self._join(event, now, own) or request
        starting = [alert for alert in alerts if self.starts(alert)]
        if starting:
            first = min(starting, key=lambda alert: (alert.severity != "critical", alert.order < 0, alert.order))
            event = self._fresh(Event.of(first, now=now, lead=self.notifier.lead_steps))
            if event.id not in self.incidents and not self._is_cooling(event) and self._room():
                # The announcement comes before anything that takes time, see `notify`.
                self.notifier.announce(event.to_json())
                request = self._join(event, now, list(alerts)) or request
            else:
                self.suppressed += 1
        if starting or (self.incidents and _is_broken(frame)):
            self._grave = frame.step
        return request

    def starts(self, alert: Alert) -> bool:
        """Does this alert start an incident? Not the end of a lasting condition."""
        return alert.severity == "critical" or (self.settings.severity == "warning" and not alert.extra.get("over"))

    def may_rerun(self, step: int) -> bool:
        """May a step be run again for an incident of its own? At most once per incident and its cool-down."""
        if not self.settings.enabled or not self.settings.capture_level:
            return False
        return not any(abs(step - other.step) <= self.settings.cooldown_steps for other in self.incidents.values()) and self._room()

    def rerun(self, event: Event, frame: Frame, alerts: Sequence[Alert]) -> Path:
        """All ranks run a step again, at once: write what they know by now, and arm nothing.

        Args:
            event: agreed by all ranks; its `capture_step` is its `step`.
            frame: what this rank saw of the step's first run.
            alerts: this rank's, of the first run.

        Returns:
            The incident directory.
        """
        event = self._fresh(event)
        self._add_incident(event, event.step)
        capture = Capture(self.settings.capture_level, event.step, 1)
        self._write(event, [*self.ring.frames(), frame][-self.settings.ring_steps :], alerts, capture)
        return self.directory / event.id

    def capture_wanted(self, step: int) -> CaptureRequest | None:
        """The request that wants `step` dumped, if any."""
        return next((request for request in self.requests if request.wants(step)), None)

    def stops_after(self, step: int) -> Event | None:
        """The incident after which the training is to end, once `step` is the last that it captures; the same step on all ranks."""
        if self._on_alert is None or not self._on_alert.stop or not self.incidents:
            return None
        event = next(iter(self.incidents.values()))
        return event if step >= event.capture_step + max(self.settings.capture_steps, 1) - 1 else None

    def close(self) -> None:
        """Stop listening. Must not raise."""
        self._tend(None)
        self.notifier.close()

    def _tend(self, now: int | None) -> None:
        """Merge what other ranks have written since, where it is time to look, and nobody else has; None: this is the last time."""
        for tended in [incident for incident in self._tended if now is None or incident.step <= now]:
            self._submit_job(partial(merge_if_behind, tended.directory), f"incident {tended.directory.name}")
            tended.step, tended.pause = tended.step + tended.pause, tended.pause * 2
            if tended.pause > _LONGEST_PAUSE:
                self._tended.remove(tended)

    def _fresh(self, event: Event) -> Event:
        """Keep apart from incidents of an earlier run in the same directory. All ranks choose the same name because they all saw the
        same names when they started: the manager is made before the first step, hence before any rank can write."""
        name, n = event.id, 2
        while name in self._old:
            name, n = f"{event.id}-run{n}", n + 1
        return replace(event, id=name)

    def _is_cooling(self, event: Event) -> bool:
        """Is it near an incident, or has what that was about not been over since?"""
        steps = [other.step for other in self.incidents.values()]
        return any(abs(event.step - step) <= self.settings.cooldown_steps for step in (*steps, *([self._grave] if steps else [])))

    def _room(self) -> bool:
        if len(self.incidents) < self.settings.max_incidents:
            return True
        if not self._full:
            self._full = True
            _log.warning("incident.max_incidents=%d reached: no further incident directories in this run", self.settings.max_incidents)
        return False

    def _add_incident(self, event: Event, now: int) -> None:
        """Another incident. The rank that has announced it looks after it, and a deputy, should that one die. Where both die, with their
        node or one after the other, further ranks look later, once or twice: few, because each look is at the files of all."""
        self.incidents[event.id] = event
        order = successors(event.rank, self.world_size)
        if self.world_size < 2 or self.rank not in order:
            return
        place = order.index(self.rank)
        directory = self.directory / event.id
        self._tended.append(_Tended(directory, now + 1) if place < 2 else _Tended(directory, now + _LATER * place, _LONGEST_PAUSE))

    def _join(self, event: Event, now: int, alerts: Sequence[Alert]) -> CaptureRequest | None:
        self._add_incident(event, now)
        directory = self.directory / event.id
        frames = self.ring.frames()
        settings = self.settings
        request: CaptureRequest | None = None
        capture: Capture | None = None
        if settings.capture_level and self._writes_steps(alerts):
            first = max(event.capture_step, now + 1)
            request = CaptureRequest(settings.capture_level, first, settings.capture_steps, directory, late=first > event.capture_step)
            capture = Capture(request.level, first, request.steps, request.late)
            self.requests.append(request)
        last = frames[-1].step >= event.step
        self._write(event, frames, alerts, capture, last=last)
        if not last:
            # Another rank is ahead: its news came before this rank's frame of that step. Written again when that has come.
            self._waiting.append((event, capture))
        return request

    def _writes_steps(self, alerts: Sequence[Alert]) -> bool:
        """In a large job one replica is enough, with the ranks that have something to show."""
        return not self.settings.rank or self.rank in self.settings.rank or bool(alerts)

    def _write(self, event: Event, frames: Sequence[Frame], alerts: Sequence[Alert], capture: Capture | None, *, last: bool = True) -> None:
        directory = self.directory / event.id

        if event.rank == self.rank:
            _log.error("INCIDENT %s: writing %d steps to %s", event.id, len(frames), directory)
        write = partial(
            write_incident,
            directory,
            frames,
            alerts,
            event=event,
            rank=self.rank,
            world_size=self.world_size,
            capture=capture,
            rank_info=self._rank_info,
            last=last,
            steps=self._writes_steps(alerts),
        )
        self._submit_job(write, f"incident {event.id}")
        if event.rank == self.rank and self._on_alert is not None:
            self._submit_job(partial(act_once, self._on_alert, event, directory), f"on_alert of incident {event.id}")

    def _submit_job(self, job: Callable[[], object], what: str) -> None:
        """Write something, where writing is done."""

        def run_job() -> None:
            try:
                job()
            except Exception as error:
                raise_of_training(error)
                self.lost += 1
                why = f"{type(error).__name__}: {error}"
                if isinstance(error, OSError):
                    where = os.fsdecode(error.filename or self.directory)
                    why = f"{where}: {explain(error, 'set output_dir to another one', path=self.directory)}"
                _log.error("%s could not be written on rank %d, training goes on: %s", what, self.rank, why)

        try:
            self._submit(run_job, what)
        except Exception as error:
            raise_of_training(error)
            self.lost += 1
            _log.error("%s was not written: %s: %s", what, type(error).__name__, error)


class Ring:
    """Keeps the newest `steps` frames. Frames are never changed after they were made, so keeping one costs a reference: 128 bytes
    of statistics per tensor plus its entry.

    Used on the training thread only; `frames` returns a copy that may go to another thread.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise UsageError(f"Ring(steps={steps}): at least one step must be kept")
        self._frames: deque[Frame] = deque(maxlen=steps)

    def append(self, frame: Frame) -> None:
        self._frames.append(frame)

    def frames(self) -> list[Frame]:
        """Oldest first."""
        return list(self._frames)

    def last(self) -> Frame | None:
        """The newest, None when there is none yet."""
        return self._frames[-1] if self._frames else None

    def __len__(self) -> int:
        return len(self._frames)
