"""The second run of a step: kept apart from the step's own record, seen at full level, written into the incident's ``rerun`` directory.

Used by `attempts` (own loops) and by the Megatron integration (Megatron's rerun machine).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core import redaction
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.formats.dump.layout import RERUN
from msprobe_engine.probe.incident import rerun_check
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.sinks.dump import crash_safe
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink
from msprobe_integrations.common.monitor.probe import Probe


def seen_so_far(probe: Probe, extra: Sequence[Sample] = (), scalars: Mapping[str, float] | None = None) -> Frame:
    """What the step in progress has shown until now. Waits for the device.

    Args:
        extra: samples that are not the step's own.
    """
    pipeline = probe.pipeline
    numbers = {name: value for name, value in pipeline._scalars.items() if isinstance(value, float)}
    current = probe.scheduler.current
    stacks = current.recorder.stacks if current is not None else None
    frame = Frame(
        step=probe.step,
        rank=probe.backend.rank() or 0,
        rows=probe.backend.so_far(),
        entries=list(pipeline.entries),
        samples=[*pipeline.samples, *extra],
        scalars={**numbers, **(scalars or {})},
        stacks=stacks.texts() if stacks is not None and pipeline.entries else [],
        level=pipeline.level,
    )
    return redaction.hide_frame(frame)


class StepRerun:
    """One second run. Between `begin` and `end` everything that the probe sees belongs to it, and nothing of it to the step.

    Args:
        judge: tells whether the fault came again.
        first: what the first run showed.
        fired: this rank asked for the second run.
        event: the incident that all ranks agreed on; None: nothing is captured or written, the second run is only kept apart.
        alerts: this rank's alerts of the first run.
    """

    def __init__(
        self, probe: Probe, judge: rerun_check.RerunCheck, first: Frame, *, fired: bool, event: Event | None, alerts: Sequence[Alert] = ()
    ) -> None:
        self._probe = probe
        self._judge = judge
        self._first = first
        self._fired = fired
        self._directory: Path | None = None
        self._sink: DumpSink | None = None
        incidents = probe.session.incidents
        if event is not None and incidents is not None:
            self._directory = incidents.rerun(event, first, alerts)
            level = incidents.settings.capture_level
            rank = probe.session.rank or 0
            framework = probe.backend.framework
            self._sink = DumpSink(self._directory / RERUN, level=level, framework=framework, rank=rank, single_file=True)

    def begin(self) -> None:
        """Put the first run aside and the capture on."""
        probe = self._probe
        self._kept = probe.pipeline.exchange()
        self._rows = probe.backend.exchange()
        if self._sink is not None:
            crash_safe.mark_step(self._sink, probe.step)
            probe.scheduler.begin_again(self._sink.level)
        else:
            probe.scheduler.pause()

    def end(self, complete: bool = True, facts: Mapping[str, Any] | None = None, samples: Sequence[Sample] = ()) -> str:
        """Take the capture off, hand the second run to the incident, go on with the first run's record.

        Args:
            complete: False when it was cut off.
            facts: more for the incident. ``machine``: what the training framework says itself (reproduced, transient): it has compared
                a value that the probe may not have seen.
            samples: more that this run showed, taken before this call.

        Returns:
            The verdict, see `rerun_check.RerunCheck.compare`.
        """
        probe = self._probe
        stacks = probe.scheduler.end_again() if self._sink is not None else None
        rows = probe.backend.finish_step().rows()
        probe.backend.exchange(self._rows)
        seen = probe.pipeline.exchange(self._kept)
        probe.scheduler.resume()
        numbers = {name: value for name, value in seen.scalars.items() if isinstance(value, float)}
        scalars = {**{k: v for k, v in self._first.scalars.items() if k == "loss_scale"}, **numbers, **(facts or {}).get("scalars", {})}
        level = self._sink.level if self._sink is not None else ""
        frame = Frame(
            step=probe.step,
            rank=self._first.rank,
            rows=rows,
            entries=seen.entries,
            samples=[*seen.samples, *samples],
            scalars=scalars,
            stacks=stacks or [],
            level=level,
            complete=complete,
            lost=seen.lost,
        )
        frame = redaction.hide_frame(frame)
        comparison = self._judge.compare(self._first, frame, fired=self._fired)
        machine = (facts or {}).get("machine")
        if machine == "transient" or (machine == "reproduced" and comparison["verdict"] not in ("reproduced", "differs")):
            comparison["verdict"] = machine
        if not complete:
            comparison["verdict"] = "interrupted"
        comparison |= {"step": probe.step, "level": level, **{k: v for k, v in (facts or {}).items() if k != "scalars"}}
        if self._sink is not None and self._directory is not None:
            crash_safe.log(self._sink, frame)
            self._write(self._sink, self._directory, frame, comparison)
        return str(comparison["verdict"])

    def _write(self, sink: DumpSink, directory: Path, frame: Frame, facts: dict[str, Any]) -> None:
        faults, rank = self._probe.faults, frame.rank

        def write() -> None:
            try:
                sink.write(frame)
                sink.close()
                rerun_check.add_second_run(directory, rank, facts)
            except Exception as error:
                raise_of_training(error)
                faults.fail("second run", error, disable=False, hint=f"the incident {directory} may lack its rerun directory")

        writer = self._probe.session.writer
        writer.call_dump(write, f"second run of step {frame.step}")
        writer.flush()  # a job with such a fault often ends here, and its launcher kills the ranks that are not the first to exit
