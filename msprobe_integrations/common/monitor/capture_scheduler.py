"""Which capture is on in a step: an armed dump, the configured dump, or the ring's level. One at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core import log
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.core.settings.selection import written_by_each
from msprobe_engine.core.window import Window
from msprobe_engine.formats.dump import world
from msprobe_engine.probe.session import Session
from msprobe_engine.probe.sinks.base import Sink, SinkInFront
from msprobe_engine.probe.sinks.dump import crash_safe
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink
from msprobe_integrations.common.dump.files import sink_of
from msprobe_integrations.common.statistics.row_options import CHECKSUMS
from msprobe_integrations.common.statistics.statistics_options import StatisticsOptions


class CaptureScheduler:
    """The captures of one probe.

    Args:
        session: settings, pipeline and writer.
        make_capture: what records the calls of a step, by its level; with ``record_collectives`` or ``optimizer_calls``.
        make_dump: the capture of a configured dump, and what saves its tensors (None: nothing does).
    """

    def __init__(self, session: Session, make_capture: Callable[..., Any], make_dump: Callable[[DumpSettings], tuple[Any, Any]]) -> None:
        self._session = session
        self._make_capture = make_capture
        self._make_dump = make_dump
        self._models: Any = None
        self._armed: Any = None
        self._armed_until = -1
        self._ring: Any = None
        self._dump: Any = None
        self._window: Window | None = None
        self._keeper: Any = None
        self._backend: Any = session.backend
        self.always = StatisticsOptions.of(session.settings)
        """What rows have in every step, whatever is captured."""
        self._summary_mode = "statistics"
        self.current: Any = None
        self._kept: Any = None
        self._sinks: list[tuple[DumpSink, Callable[[int], bool]]] = []
        settings = session.settings
        if settings.incident.enabled and settings.incident.level:
            self._ring = self._make_capture(settings.incident.level, record_collectives=True, optimizer_calls=False)
        if settings.dump is not None:
            # Does a probe write this dump? Calls for a benchmark host are not meant for the disk
            own = settings.dump.level in ("L0", "L1", "mix") and settings.dump.task != "free_benchmark" and settings.dump.online is None
            self._say_unused(settings.dump, own)
            if own:
                self._plan_dump(settings.dump)

    @staticmethod
    def _say_unused(dump: DumpSettings, dumped: bool) -> None:
        """Keys that only `PrecisionDebugger` follows; and is there a dump without them?"""
        unused = [key for key in ("load", "bench_path", "online") if getattr(dump, key) is not None]
        if dump.level in ("L2", "debug"):
            unused.append(f"level '{dump.level}'")
        if dump.task == "free_benchmark":
            unused.append(f"task '{dump.task}'")
        if unused:
            text = f"dump: {' and '.join(unused)} have no effect here{'' if dumped else ', and no dump is written'}"
            log.warn_once(f"dump keys of the probe: {unused}", f"{text}; PrecisionDebugger follows them")

    def _plan_dump(self, dump: DumpSettings) -> None:
        window = self._window = Window(dump.rank, dump.step)
        self._summary_mode = dump.summary_mode
        self._dump, self._keeper = self._make_dump(dump)
        root = Path(dump.dump_path) if dump.dump_path else self._session.output_dir / "dump"
        rank = self._session.rank
        if window.is_wanted(min(dump.step, default=0), rank):
            self._add_sink(root, dump.level, lambda step: window.is_wanted(step, rank), dump)

    def attach(self, models: Any) -> None:
        """Name the modules in every capture."""
        self._models = models
        for capture in (self._ring, self._dump):
            if capture is not None:
                capture.attach(models, anew=True)

    def open(self, step: int) -> None:
        """Put the step's capture on; captures that are not wanted in this step are taken off."""
        self._arm(step)
        chosen: Any = None
        dumped = self._dump is not None and self._window is not None and self._window.is_wanted(step, self._session.rank)
        if self._armed is not None:
            chosen = self._armed
            chosen.recorder.keeper = self._keeper if dumped else None  # the configured dump of this step sees what this one sees
        elif dumped:
            chosen = self._dump
        elif self._ring is not None:
            chosen = self._ring
        if self.current is not None and self.current is not chosen:
            self.current.close()
        self.current = chosen
        mode = self._summary_mode if chosen is not None and chosen is self._dump else "statistics"
        self.always.apply(self._backend, digest=mode == "digest", checksum=CHECKSUMS.get(mode, ""))
        if chosen is not None:
            for sink in self._sinks_of(step):
                crash_safe.mark_step(sink, step)
            if dumped and self._keeper is not None:
                self._keeper.begin_step(step)
            chosen.open()
        else:
            self._session.pipeline.level = ""

    def end_step(self, step: int) -> list[list[str]] | None:
        """Close the step; returns the texts of its call stacks."""
        stacks = None
        if self.current is not None:
            self.current.pause()
            stacks = self.current.end_step()
        if self._armed is not None and step + 1 >= self._armed_until:
            self._armed.close()
            if self.current is self._armed:
                self.current = None
            self._armed = None
            self._session.armed = None
        return stacks

    def begin_again(self, level: str) -> None:
        """A second run of the step begins: a capture of its own, of this level, in place of the step's."""
        self._kept = self.current
        if self._kept is not None:
            self._kept.close()  # its numbering stays
        self.current = self._make_capture(level)
        if self._models is not None:
            self.current.attach(self._models)
        self.current.open()

    def end_again(self) -> list[list[str]]:
        """The second run is over; the step's own capture is on again after `resume`. Returns the texts of the call stacks."""
        capture = self.current
        self.current, self._kept = self._kept, None
        if capture is None:
            return []
        capture.pause()
        stacks: list[list[str]] = capture.end_step()
        capture.close()
        return stacks

    def pause(self) -> None:
        """See nothing until the next `resume`."""
        if self.current is not None:
            self.current.pause()

    def resume(self) -> None:
        """See again what the step's capture sees."""
        if self.current is not None:
            self.current.open()

    def close(self) -> None:
        for capture in (self._armed, self._dump, self._ring):
            if capture is not None:
                capture.close()
        self.current = None

    def _arm(self, step: int) -> None:
        request = self._session.armed
        if request is None or self._armed is not None or step < request.first_step or self._models is None:
            return
        self._armed = self._make_capture(request.level, record_collectives=True)
        self._armed.attach(self._models)
        first, until = step, step + request.steps
        self._armed_until = until
        self._add_sink(request.directory, request.level, lambda s: first <= s < until)

    def _add_sink(self, root: Path, level: str, wanted: Callable[[int], bool], dump: DumpSettings | None = None) -> None:
        rank = self._session.rank
        if dump is None and rank is None:
            rank = 0  # an incident directory has ranks, also in a run of one process
        framework = self._session.backend.framework
        if dump is not None:
            store = self._keeper.store if self._keeper is not None else None
            sink = sink_of(dump, root, framework, rank, store, time.time())
        else:
            sink = DumpSink(root, level=level, framework=framework, rank=rank, single_file=True)
        if dump is not None and written_by_each(dump):
            sink.tell_world(world.of_process(rank, self._backend.world_size(), dump.rank))
        if not self._sinks:
            self._session.pipeline.save_early(self._log_frame)
        self._sinks.append((sink, wanted))
        self._session.writer.dump_sinks.append(SelectSink(sink, wanted))

    def _sinks_of(self, step: int) -> list[DumpSink]:
        return [sink for sink, wanted in self._sinks if wanted(step)]

    def _log_frame(self, frame: Frame) -> None:
        if frame.entries:
            for sink in self._sinks_of(frame.step):
                crash_safe.log(sink, frame)


class SelectSink(SinkInFront):
    """Passes on the frames whose step is `wanted` and drops the others.

    Args:
        sink: where wanted frames go.
        wanted: says whether a step is wanted.
    """

    def __init__(self, sink: Sink, wanted: Callable[[int], bool]) -> None:
        super().__init__(sink)
        self._wanted = wanted

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        if self._wanted(frame.step):
            self._sink.write(frame, alerts)
