"""The sink ``tracker``: scalars, gauges per layer and counts of alerts go to the tracker's run that is open in this process.

Requests to a tracker may take seconds, and the thread that writes files must not wait for them: a thread of this sink sends, what waits is
bounded, and what a slow tracker has no room for is counted and said at the end.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.log import get_logger, printable
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import TrackerSettings
from msprobe_engine.probe.rules.layout import LayoutCache
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.prometheus.layers import Key, LayerGauges
from msprobe_engine.probe.sinks.tracker.open_runs import PREFIX, OpenRun, OpenRuns

WAITING = 256
"""Steps that may wait for the tracker."""
CLOSE_SECONDS = 10.0
"""How long `flush` and `close` wait for it."""
_DEFAULTS = frozenset(("reduced", "output"))
_log = get_logger()
_Step = tuple[list[OpenRun], int, dict[str, float], str]


class TrackerSink(Sink):
    """Sends numbers on a thread of its own.

    Args:
        settings: section ``sinks.tracker``.
        rank: global rank. Each rank sends to the run that its own process has opened: most programs open one on rank 0, Megatron on the
            last rank.
    """

    name = "tracker"

    def __init__(self, settings: TrackerSettings, *, rank: int) -> None:
        self._rank = rank
        self._max_series = settings.max_series
        self._gauges = LayerGauges() if settings.layers else None
        self._layouts = LayoutCache()
        self._open_runs = OpenRuns()
        self._runs: list[OpenRun] = []
        self._looks = True
        self._alerts: Counter[str] = Counter()
        self._names: dict[str, None] = {}
        self._left_out: set[str] = set()
        self._lost = 0
        self._failed: set[str] = set()
        self._sent: set[str] = set()
        self._queue: queue.Queue[_Step | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        if not self._looks:
            return
        try:
            self._runs = self._open_runs.find()
        except Exception as error:  # a tracker of another version, or a module of the user's that has its name
            self._looks, self._runs = False, []
            _log.error("sinks.tracker: the open run cannot be joined, nothing is sent: %s", printable(f"{type(error).__name__}: {error}"))

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Hand the numbers of a step to the thread that sends."""
        self._alerts.update(alert.rule for alert in alerts)
        if not (runs := [run for run in self._runs if run.tracker not in self._failed]):
            return
        numbers = {f"{PREFIX}{name}": value for name, value in frame.scalars.items()}
        numbers |= {f"{PREFIX}alerts/{rule}": float(count) for rule, count in sorted(self._alerts.items())}
        if self._gauges is not None and frame.samples:
            numbers |= {_tag(key): value for key, value in self._gauges.values(frame, self._layouts.of(frame))}
        numbers = {name: value for name, value in numbers.items() if self._has_room(name)}
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="msprobe-tracker", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((runs, frame.step, numbers, alerts[-1].message if alerts else ""))
        except queue.Full:
            self._lost += 1

    def _has_room(self, name: str) -> bool:
        if name not in self._names:
            if len(self._names) >= self._max_series:
                self._left_out.add(name)
                return False
            self._names[name] = None
        return True

    def flush(self) -> None:
        until = time.monotonic() + CLOSE_SECONDS
        while self._thread is not None and self._queue.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        self.flush()
        if self._thread is not None:
            lost = self._lost + self._queue.qsize()
            if lost:
                _log.warning("sinks.tracker: %d steps were not sent: the tracker took longer than the steps", lost)
        elif not self._rank and self._looks:
            _log.warning("sinks.tracker: no run of W&B, SwanLab or MLflow was open in this process; nothing was sent")
        if self._left_out:
            _log.warning("sinks.tracker.max_series (%d): %d series were left out", self._max_series, len(self._left_out))

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            runs, number, numbers, alert = step
            for run in runs:
                if run.tracker in self._failed or not run.open:  # the program has finished it: what came later has no place
                    continue
                try:
                    run.send(number, numbers, alert)
                    if run.tracker not in self._sent:
                        self._sent.add(run.tracker)
                        _log.info("sinks.tracker: step %d and later go to the open run of %s, as %s...", number, run.tracker, PREFIX)
                except Exception as error:
                    if run.open:
                        self._failed.add(run.tracker)
                        text = printable(f"{type(error).__name__}: {error}")
                        _log.error("sinks.tracker: %s takes no more from step %d on: %s", run.tracker, number, text)
            self._queue.task_done()


def _tag(key: Key) -> str:
    metric, labels = key
    by_name = dict(labels)
    more = "".join(f"_{value}" for name, value in labels if name != "layer" and value not in _DEFAULTS)
    layer = by_name.get("layer", "")
    return f"{PREFIX}{metric}{more}/{layer}" if layer else f"{PREFIX}{metric}{more}"
