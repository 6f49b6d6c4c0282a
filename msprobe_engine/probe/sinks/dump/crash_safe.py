"""The two early calls of a dump sink, at the begin of a step and as soon as its frame is there: a killed process loses no finished step.

Both only add safety. What they cannot write, `DumpSink.write` tries again on the writer thread, where a failure is counted and said.
"""

from __future__ import annotations

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink

_log = get_logger()


def mark_step(sink: DumpSink, step: int) -> None:
    """Mark `step` as begun."""
    try:
        sink.begin_step(step)
    except SinkError as error:
        _log.debug("step %d could not be marked: %s", step, error)


def log(sink: DumpSink, frame: Frame) -> None:
    """Save a finished frame in raw form."""
    try:
        sink.write_log(frame)
    except SinkError as error:
        _log.debug("step %d could not be logged: %s", frame.step, error)
