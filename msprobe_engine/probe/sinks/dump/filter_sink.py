"""A dump of chosen records: a sink in front of that of the files looks at every finished frame and hands on what it chooses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.writing.tensor_names import tensor_files
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.probe.sinks.base import Sink, SinkInFront
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink


class ChosenRecords(SinkInFront):
    """What sinks of this kind share. The frame log of a killed process has all records of its last step.

    Args:
        sink: takes what is left.
        files: the `DumpSink` behind it: where files are.
        tensors: the store of `files`; files of the step that belong to no chosen record are removed.
    """

    def __init__(self, sink: Sink, files: DumpSink, tensors: TensorStore | None) -> None:
        super().__init__(sink)
        self._files = files
        self._tensors = tensors
        if tensors is not None:
            tensors.with_frames = True

    @property
    def done(self) -> bool:
        """True when no more records are wanted."""
        raise NotImplementedError

    def choose(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Look at a frame and call `write_only` or `discard`.

        Raises:
            SinkError: a file cannot be written.
        """
        raise NotImplementedError

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Write the chosen records of a frame. Frames after the last wanted record are dropped with their directory.

        Raises:
            SinkError: a file cannot be written.
        """
        if self.done:
            self.discard(frame.step)
        else:
            self.choose(frame, alerts)

    def write_only(self, frame: Frame, kept: Sequence[str], alerts: Sequence[Alert]) -> None:
        """Write the records called `kept`, with their tensors."""
        wanted = set(kept)
        entries = [entry for entry in frame.entries if entry.name in wanted]
        if self._tensors is not None:
            options = self._tensors.options
            named = {file for e in entries for _, file, _ in tensor_files(e, options.sections(e), options.suffix) if file is not None}
            self._tensors.keep_only(frame.step, named)
        updated = sum(entry.name in wanted for entry in frame.entries[: frame.updated]) if frame.updated >= 0 else -1
        self._sink.write(replace(frame, entries=entries, updated=updated), alerts)

    def discard(self, step: int) -> None:
        """Take away what there is of a step."""
        if self._tensors is not None:
            self._tensors.keep_only(step, ())
            self._tensors.finish(step)
        path = self._files.directory(step)
        for file in (layout.FRAME_LOG, layout.MARKER):
            with contextlib.suppress(OSError):
                os.unlink(path / file)
        for directory in (path / layout.TENSORS, path, path.parent):  # where nothing is left
            with contextlib.suppress(OSError):
                directory.rmdir()
