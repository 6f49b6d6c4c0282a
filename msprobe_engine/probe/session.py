"""What every probe has, whatever the framework: settings, output directory, rules, sinks, incidents, and the step boundary."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msprobe_engine.core import redaction
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.backend import Backend
from msprobe_engine.core.guard import Faults, raised_at
from msprobe_engine.core.log import get_logger, one_line, set_rank
from msprobe_engine.core.process.launch import is_restart, number_of_processes
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import ProbeSettings, RuleSettings
from msprobe_engine.core.statistics.rows import empty
from msprobe_engine.core.text.ranges import ranges_of
from msprobe_engine.probe.closing_words import ClosingWords
from msprobe_engine.probe.earlier_run import find_earlier_run, set_aside
from msprobe_engine.probe.incident.manager import CaptureRequest, IncidentManager
from msprobe_engine.probe.incident.notify import Notifier, SilentNotifier
from msprobe_engine.probe.incident.on_alert import STOPPED, StopTraining
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_engine.probe.sinks.run_files import ENDED
from msprobe_engine.probe.writer import Writer

TRACKER_PATIENCE_SECONDS = 2.0
"""How long the end of a tracker's run may be held up by rows that are on their way, from the device or from ranks that have not ended their
step."""
_log = get_logger()


class Session:
    """Life of one probe in one process.

    Args:
        missing: names of a framework that have gone, to the part that is off without them; its owner goes on filling it.

    Attributes:
        armed: the dump that an alert (of this or another rank) has ordered, None when there is none.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        backend: Backend,
        *,
        local_rank: int = 0,
        local_world_size: int = 1,
        notifier: Notifier | None = None,
        extra_sinks: Sequence[Sink] = (),
        missing: Mapping[str, str] | None = None,
    ) -> None:
        from msprobe_engine.probe.rules.build import build_rules
        from msprobe_engine.probe.sinks.build import build_sinks

        redaction.demand(settings.redact)
        self.settings = settings
        self.backend = backend
        self.faults = Faults(settings.strict)
        self.output_dir = Path(settings.output_dir)
        self.rank = backend.rank()
        self.armed: CaptureRequest | None = None
        self._now = 0
        self._earlier = ""
        self._ended: dict[str, Any] = {}
        if self.rank is not None:
            set_rank(self.rank)
        rank = self.rank or 0
        with_rules = settings
        if settings.monitor is not None or settings.incident.level:
            with_rules = settings if settings.rules else replace(settings, rules=(RuleSettings(),))
        with self.faults.guard("look for an earlier run"):
            self._earlier = find_earlier_run(settings, rank) if not rank else ""
        sinks, errors = build_sinks(
            settings,
            output_dir=self.output_dir,
            rank=rank,
            local_rank=local_rank,
            local_world_size=local_world_size,
            world_size=backend.world_size(),
            monitor=settings.monitor,
        )
        for error in errors:
            # Every message begins with the name of its sink.
            self.faults.fail(str(error).partition(":")[0], error, hint="the other sinks work" if sinks else "no other sink works")
        self.writer = Writer([*sinks, *extra_sinks], self.faults, int(settings.sinks.max_gb * 1e9))
        self.pipeline = Pipeline(backend, build_rules(with_rules), self.writer, self.faults)
        for rule in self.pipeline.rules:
            rule.bind(self.raise_alert)
        self._closing = ClosingWords(settings, backend.world_size())
        self._said = False
        if not rank:
            self.pipeline.listeners.append(self._closing.on_frame)
        self.incidents: IncidentManager | None = None
        self._incident_lock = threading.Lock()
        if settings.incident.enabled and with_rules.rules:
            self.incidents = IncidentManager(
                settings.incident,
                output_dir=self.output_dir,
                rank=rank,
                world_size=backend.world_size(),
                notifier=notifier or SilentNotifier(),
                submit=self._submit,
                rank_info=self.pipeline.rank_info,
                on_alert=settings.on_alert,
            )
            self.pipeline.listeners.append(self._incident)
        elif notifier is not None:
            notifier.close()  # it has a thread from the beginning
        for sink in self.writer.sinks:
            sink.watch_info(self.pipeline.rank_info)
            sink.watch_remark("without_optimizer", self.pipeline.without_optimizer)
            sink.watch_remark("computed_in", self.pipeline.computed_in)
            sink.watch_remark("program", self.pipeline.program)
            sink.watch_remark("tensors_of", {"ranks": ranges_of(settings.sinks.rank)} if settings.sinks.rank else {})
            sink.watch_remark(ENDED, self._ended)
            sink.watch_remark("missing", {} if missing is None else missing)
            sink.watch_remark("switched_off", self.faults.off)
            for rule in self.pipeline.rules:
                if rule.passed_over is not None:
                    sink.watch_remark(rule.remark, rule.passed_over)
            sink.watch_losses(self.writer.lost)
            sink.watch_cost(self.pipeline.cost)

    def start_first_step(self, step: int) -> None:
        """The first step begins."""
        said: list[str] = []
        with self.faults.guard("earlier run"):
            said = set_aside(self.settings, self.backend.rank() or 0, number_of_processes(self.backend.world_size()), step)
        self.say_what_is_on()
        for sentence in said if not self.backend.rank() else ():
            _log.warning("%s", sentence)

    def say_what_is_on(self) -> None:
        """One line on rank 0: that the probe is there, what it watches and where it writes; a second where another run has written."""
        if self.rank:
            return
        settings = self.settings
        parts = []
        if settings.monitor is not None:
            parts.append("monitor")
        if settings.dump is not None:
            parts.append(f"dump {settings.dump.level}")
        if self.incidents is not None:
            parts.append(f"incidents (last {settings.incident.ring_steps} steps, level {settings.incident.level or 'of the monitor'})")
        if not parts:
            _log.warning("the probe has nothing to do: the settings have no monitor, dump or incident.level section")
            return
        sinks = ", ".join(f"{s.name} on port {s.port}" if s.port else s.name for s in (*self.writer.sinks, *self.writer.dump_sinks))
        self._said = True
        _log.info("msprobe is on: %s; writing to %s%s", ", ".join(parts), self.output_dir, f" ({sinks or 'no sink'})")
        if self._earlier:
            _log.log(logging.INFO if is_restart() else logging.WARNING, "%s", self._earlier)

    def end_step(
        self, step: int, scalars: Mapping[str, Any] | None = None, stacks: list[list[str]] | None = None, complete: bool = True
    ) -> None:
        """Close a step; `complete` False: it was cut off."""
        self._now = step
        with self.faults.guard("step boundary"):
            numbers = {**(scalars or {}), **({} if complete else {"interrupted": 1.0})}  # every sink shows it
            for name, value in numbers.items():
                self.pipeline.scalar(name, value)
            self.pipeline.end_step(step, stacks, complete)

    def stop_if_wanted(self, step: int) -> None:
        """End the training after a step, where ``on_alert.stop`` wants it: called on the training's thread when all of the step is done.

        Raises:
            StopTraining: it is to end now.
        """
        event = None if self.incidents is None else self.incidents.stops_after(step)
        if event is not None:
            _log.error("on_alert.stop: the training ends after step %d, because of incident %s (exit code %d)", step, event.id, STOPPED)
            raise StopTraining(STOPPED)

    def hold(self, held: bool) -> None:
        """Evaluation begins (True) or is over: rules that expect steps wait."""
        for rule in self.pipeline.rules:
            rule.hold(held)

    def apply_settings(self, settings: ProbeSettings) -> None:
        """The monitor's settings have changed: sinks show other columns from the frame of the next step on."""
        self.settings = settings
        if settings.monitor is not None:
            for sink in self.writer.sinks:
                job = partial(sink.follow, settings.monitor)
                self.pipeline.afterwards(partial(self.writer.call, job, f"settings of sink {sink.name}"))

    @property
    def frames(self) -> list[Frame]:
        """What the memory sink has kept, oldest first; waits until the writer has handed everything on."""
        self.writer.flush()
        return [frame for sink in self.writer.sinks if isinstance(sink, MemorySink) for frame in sink.frames]

    def hand_over_to_tracker(self) -> None:
        """The program closes its tracker's run: the steps that have ended go there first. What other ranks still owe is not waited for
        for long; such a step goes to the other sinks when it is whole."""
        with self.faults.guard("sinks.tracker"):
            until = time.monotonic() + TRACKER_PATIENCE_SECONDS
            self.pipeline.advance()
            while self.pipeline.waits and time.monotonic() < until:
                time.sleep(0.005)
                self.pipeline.advance()
            self.writer.wait_for_monitor()
            for sink in self.writer.sinks:
                if sink.name == "tracker":
                    sink.flush()

    def close(self, *, signalled: bool = False) -> None:
        """Finish all steps and close every sink. Safe to call twice.

        Args:
            signalled: a signal ends the process.
        """
        with self.faults.guard("closing"):
            self._ended.update(self._ended or _describe_end(signalled=signalled, redact=bool(self.settings.redact)))
        for rule in self.pipeline.rules:
            with self.faults.guard(f"rule {rule.name}"):
                rule.close()
        with self.faults.guard("closing"):
            self.pipeline.advance(wait=True)
            for alert in self.pipeline.untold():
                self.raise_alert(alert)
        with self.faults.guard("closing"):
            self.pipeline.close()
        if self.incidents is not None:
            with self.faults.guard("incidents"):
                self.incidents.close()
        if self._said:
            self._said = False
            with self.faults.guard("closing words"):
                incidents = [] if self.incidents is None else list(self.incidents.incidents)
                if text := self._closing.text(incidents, self.writer.lost):
                    _log.info("%s", text)

    def _incident(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        assert self.incidents is not None
        with self._incident_lock:
            request = self.incidents.on_frame(frame, alerts, self._now)
        if request is not None:
            self._arm(request)

    def raise_alert(self, alert: Alert) -> None:
        """An alert of a thread that watches the training, or after the last step: said, written and made an incident of without
        waiting for a step."""
        frame = Frame(alert.step, alert.rank, empty(0), framework=self.backend.framework, complete=False)
        try:
            self.writer.submit(frame, [alert])
            self.writer.wait_for_monitor()
        finally:
            self._closing.add_alerts([alert])
            _log.log(logging.ERROR if alert.severity == "critical" else logging.WARNING, "ALERT %s", alert.message)
        if self.incidents is not None and self.incidents.starts(alert):
            self._incident(frame, [alert])

    def _arm(self, request: CaptureRequest) -> None:
        if self.armed is None:
            self.armed = request
            _log.warning("capture of level %s armed for step %d", request.level, request.first_step)

    def _submit(self, job: Any, what: str) -> None:
        self.writer.call_dump(job, what)  # frames of an incident are written as dumps


# What ended a training, as far as the process that it ran in can see when the probe is closed.
_LONGEST = 300


def _describe_end(*, signalled: bool, redact: bool) -> dict[str, Any]:
    """JSON-ready: ``how`` is ``closed``, ``exception`` or ``signal``; of an exception also its type, message and where it was raised.

    Args:
        signalled: a signal ends the process.
        redact: texts of the training must not be written: the message is left out.
    """
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return {"how": "signal" if signalled else "closed"}
    end: dict[str, Any] = {"how": "signal" if signalled else "exception", "error": type(error).__name__}
    if not redact and (message := one_line(str(error))):
        end["message"] = message[:_LONGEST]
    if where := raised_at(error):
        end["where"] = where
    return end
