"""A sink for some steps only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.sinks.base import Sink, SinkInFront


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
