"""What the dump settings ask for besides a dump: a choice of records (bench_path, overflow_check), and what a framework adds (replay of
inputs, kernels of an NPU, the free benchmark)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink
from msprobe_engine.probe.sinks.dump.earlier_dump import Bench, DifferenceSink
from msprobe_engine.probe.sinks.dump.overflow import Overflows, OverflowSink


class DumpPlugin:
    """Follows the calls of the debugger beside the dump, or in its place.

    Attributes:
        api: sees calls of APIs where there is no dump; None: it sees none.
    """

    api: Any = None

    @property
    def alone(self) -> bool:
        """Nothing else is wanted: there is no dump."""
        return True

    def begin(self, model: Any, step: int, rank: int | None) -> None:
        """``start()``. `model` is what was given to it, None when nothing was."""

    def pause(self) -> None:
        """``stop()``."""

    def end_step(self, next_step: int) -> None:
        """``step()``."""

    def close(self) -> None:
        """Take everything off."""


class DumpPlugins:
    """All methods are called on the training thread.

    Args:
        skip: counts what is left out on purpose, by reason.
        parts: what the framework adds.
    """

    def __init__(self, dump: DumpSettings, skip: Callable[[str], None], parts: Sequence[DumpPlugin] = ()) -> None:
        self._bench = None if dump.bench_path is None else Bench(dump.bench_path, dump.diff_nums)
        self._overflows = Overflows(dump.overflow_nums) if dump.task == "overflow_check" else None
        self._skip = skip
        self.parts = tuple(parts)

    @property
    def dumps(self) -> bool:
        """False when a part is wanted alone."""
        return not any(part.alone for part in self.parts)

    @property
    def ended(self) -> bool:
        """True when all that was to be found was found."""
        return (self._bench is not None and self._bench.done) or (self._overflows is not None and self._overflows.left == 0)

    def begin(self, model: Any, step: int, rank: int | None) -> None:
        """``start()``. Hooks of the dump must be put on later than those of the parts, to see what the modules see."""
        for part in self.parts:
            part.begin(model, step, rank)

    def pause(self) -> None:
        """``stop()``."""
        for part in self.parts:
            part.pause()

    def end_step(self, next_step: int) -> None:
        """``step()``."""
        for part in self.parts:
            part.end_step(next_step)

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def sink(self, sink: Sink, files: DumpSink, tensors: TensorStore | None, rank: Callable[[], int | None]) -> Sink:
        """`sink`, or one in front of it that passes on what differs from the earlier dump, or what has NaN or Inf."""
        if self._overflows is not None:
            return OverflowSink(sink, files, self._overflows, tensors, self._skip)
        return sink if self._bench is None else DifferenceSink(sink, files, self._bench, tensors, rank)
