"""Frames kept in memory."""

from __future__ import annotations

import math

from frames_of_lists import frame_of

from msprobe_engine.probe.rules.builtin.values.nan_inf import NanInfRule
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.memory import MemorySink


def test_keeps_the_last_frames_and_their_alerts() -> None:
    """The last `limit` frames and only their alerts are kept, also after close."""
    sink = MemorySink(limit=2)
    assert isinstance(sink, Sink)
    for step in range(4):
        frame = frame_of({"w": [math.nan]}, step=step)
        sink.write(frame, NanInfRule().check(frame))
    sink.flush()
    sink.close()
    assert [f.step for f in sink.frames] == [2, 3]
    assert [a.step for a in sink.alerts] == [2, 3]
