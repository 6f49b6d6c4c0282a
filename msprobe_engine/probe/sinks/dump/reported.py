"""A dump sink that tells what it has written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.formats.dump import layout
from msprobe_engine.probe.sinks.base import SinkInFront
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink

Written = Callable[[Frame, str, list[int]], None]


class ReportedSink(SinkInFront):
    """Passes everything on.

    Args:
        sink: where frames go.
        written: called on the writer thread after a step was written, with the frame, its main file (dump.json or debug.json) and
            the sizes of its JSON files in bytes.
    """

    def __init__(self, sink: DumpSink, written: Written) -> None:
        super().__init__(sink)
        self._directory = sink.directory
        self._written = written

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        self._sink.write(frame, alerts)
        directory = self._directory(frame.step)
        sizes: list[int] = []
        main = ""
        for name in (layout.STACK, layout.CONSTRUCT, layout.SHAPES, layout.DUMP, layout.DEBUG):
            try:
                sizes.append(os.stat(directory / name).st_size)
            except OSError:
                continue
            main = str(directory / name)
        if main:
            self._written(frame, main, sizes)
