"""Where the steps of a dump are written: the sink of this process, its rank, and what it has written so far."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.backend import Backend
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.log import get_logger, set_rank
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.core.settings.selection import selection, written_by_each
from msprobe_engine.formats.dump import layout, world
from msprobe_engine.formats.dump.writing.tally import Tally
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.probe.output_claims import OutputClaims
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.sinks.base import Sink, SinkInFront
from msprobe_engine.probe.sinks.dump import crash_safe
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink
from msprobe_engine.probe.writer import Writer


class RankedBackend(Backend, Protocol):
    """A backend whose rank somebody may set by hand."""

    assigned_rank: int | None


_log = get_logger()
Front = Callable[[Sink, DumpSink, "TensorStore | None", Callable[[], "int | None"]], Sink]


def sink_of(dump: DumpSettings, root: Path, framework: str, rank: int | None, tensors: TensorStore | None, began: float) -> DumpSink:
    """What writes the files that a dump asks for; `began`: as of `DumpSink`."""
    options = {key: getattr(dump, key) for key in ("task", "level", "extra_info", "data_mode", "summary_mode")}
    options |= {"selection": selection(dump), "in_run_directory": not dump.dump_path}
    return DumpSink(root, framework=framework, rank=rank, tensors=tensors, began=began, **options)


class DumpFiles:
    """The way from finished steps to files.

    Args:
        backend: where tensors are reduced; it knows the rank.

    Attributes:
        tally: what was written.
        tensors: where tensors of the dump are saved, None when they are not; to be set before a step begins.
        before_rename: called before directories get another name.
        wrote_in: called on the writer's thread with the directory of a step that was written.
    """

    def __init__(self, backend: RankedBackend, faults: Faults) -> None:
        self.backend = backend
        self.writer = Writer([], faults)
        self.pipeline = Pipeline(backend, [], self.writer, faults, [self._count_lost])
        self.pipeline.save_early(self._log_frame)
        self.tally = Tally()
        self.dump = DumpSettings()
        self.root = Path()
        self._given = self.root
        self._outputs = OutputClaims()
        self.sink: DumpSink | None = None
        self.tensors: TensorStore | None = None
        self._rank: int | None = None
        self._front: Front | None = None
        self._said_ranks = False
        self._began = time.time()
        self.before_rename: Callable[[], None] = lambda: None
        self.wrote_in: Callable[[Path], None] = lambda _directory: None

    def configure(self, dump: DumpSettings, root: Path, front: Front | None = None) -> None:
        """Write as `dump` says from the next step on. `front` may put a sink in front of the one it is given."""
        self.drop()
        self.dump, self.root, self._said_ranks, self._front = dump, root, False, front
        self._given = root

    def claim(self, dump: DumpSettings, root: Path) -> Path:
        """Where this process may write below `root`. Before the first step only where that has to be known: a program makes a debugger
        in processes that never dump anything, like the one that starts its ranks."""
        return self._outputs.claim_part(root, self.backend.rank(), of_output_dir=not dump.dump_path, by_process=bool(dump.dump_path))

    def begin_step(self, step: int) -> None:
        """A step begins: its directory is made."""
        self._use_sink(self.backend.rank())
        assert self.sink is not None
        self._tell_world(self.sink)
        crash_safe.mark_step(self.sink, step)
        self.log_progress("Dump switch is turned on at step %d. Dump data will be saved in %s", step, self.sink.directory(step))

    def _use_sink(self, rank: int | None) -> None:
        if self.sink is not None and rank == self._rank:
            return
        self.drop()
        if rank is not None:
            set_rank(rank)
        self.root = self.claim(self.dump, self._given)
        self.sink = sink_of(self.dump, self.root, self.backend.framework, rank, self.tensors, self._began)
        self._rank = rank
        sink: Sink = ReportedSink(self.sink, self._wrote)
        if self._front is not None:
            sink = self._front(sink, self.sink, self.tensors, self.backend.rank)
        self.writer.dump_sinks[:] = [sink]

    def wait(self) -> None:
        """Return when every finished step is written."""
        self.pipeline.advance(wait=True)
        self.writer.flush()

    def drop(self) -> None:
        """The next step gets a sink of its own; what is on its way still belongs to this one."""
        if self.sink is not None:
            self.wait()
            self.sink.close()
            self.sink = None
            self.writer.dump_sinks.clear()

    def release(self) -> None:
        """This process writes no dump any more: its directory is free."""
        self._outputs.release()

    def settle_rank(self) -> None:
        """The process group may come up after the first steps: their directories get the name of the rank."""
        rank = self.backend.rank()
        if self.sink is not None and self._rank is None and rank is not None:
            self.wait()
            self.before_rename()
            set_rank(rank)
            self.sink.assign_rank(rank)
            self._rank = rank
            self._tell_world(self.sink)

    def _tell_world(self, sink: DumpSink) -> None:
        if self.backend.assigned_rank is not None:
            sink.tell_no_time()
        elif written_by_each(self.dump):
            sink.tell_world(world.of_process(self._rank, self.backend.world_size(), self.dump.rank))

    def say_missing_ranks(self) -> None:
        """Ranks that are listed and do not exist are named once, on rank 0, when the size of the job is known."""
        rank = self.backend.rank()
        if self._said_ranks or rank is None or self.backend.assigned_rank is not None:
            return
        self._said_ranks = True
        size = self.backend.world_size()
        missing = [r for r in self.dump.rank if r >= size]
        if missing and rank == 0:
            _log.warning("'rank' lists %s, but the ranks of this run are 0 to %d", ", ".join(map(str, missing)), size - 1)

    def summary(self) -> str:
        """What was written so far, and what was lost."""
        frames = {f"frames of sink {name}" if name == "dump" else name: count for name, count in self.writer.lost.items()}
        tensors = (self.tensors.written, self.tensors.quota.used) if self.tensors is not None else (0, 0)
        return self.tally.text(self.root, tensors, frames)

    def log_progress(self, text: str, *values: Any) -> None:
        """One line of progress, on the first rank that dumps."""
        first = (self._rank or 0) == min(self.dump.rank, default=0)
        (_log.info if first else _log.debug)(text, *values)

    def _wrote(self, frame: Frame, main: str, sizes: list[int]) -> None:
        self.tally.wrote(frame.step, len(frame.entries), sizes, frame.complete)
        self.log_progress("%s is at %s", Path(main).name, main)
        self.wrote_in(Path(main).parent)

    def _count_lost(self, frame: Frame, _alerts: Sequence[Alert]) -> None:
        self.tally.lose(frame.lost)

    def _log_frame(self, frame: Frame) -> None:
        if self.sink is not None:
            crash_safe.log(self.sink, frame)


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
