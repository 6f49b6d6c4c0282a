"""What the dump settings ask for besides a dump: replay of inputs, a choice of records (bench_path, overflow_check), kernels of an NPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msprobe_engine.dump.bench import Bench, DifferenceSink
from msprobe_engine.dump.overflow import Overflows, OverflowSink
from msprobe_engine.dump.tensors import TensorStore
from msprobe_engine.dump.writer import DumpSink
from msprobe_engine.guard import Faults
from msprobe_engine.settings.schema import DumpSettings
from msprobe_engine.sinks.base import Sink
from msprobe_engine.window import Window
from msprobe_integrations.torch.dump_checks import Models
from msprobe_integrations.torch.kernel_dump import KernelDump
from msprobe_integrations.torch.replay import Replay


class Extras:
    """Follows the calls of the debugger. All methods are called on the training thread.

    Args:
        dump: the settings.
        root: where step directories are.
        faults: isolation of failures.
        skip: counts what is left out on purpose, by reason.

    Raises:
        UsageError: level L2 without an NPU.
    """

    def __init__(self, dump: DumpSettings, root: Path, faults: Faults, skip: Callable[[str], None]) -> None:
        self._window = Window(dump.rank, dump.step)
        self._load = dump.load
        self._bench = None if dump.bench_path is None else Bench(dump.bench_path, dump.diff_nums)
        self._overflows = Overflows(dump.overflow_nums) if dump.task == "overflow_check" else None
        self._skip = skip
        self.kernels = KernelDump(dump.list[0], root, faults) if dump.level == "L2" else None
        self.replay = None if dump.load is None else Replay(dump.load, faults)

    @property
    def dumps(self) -> bool:
        """False when nothing else is wanted: replay alone, or kernels alone."""
        return self.kernels is None and (self._load is None or self._load.dump_after_load)

    @property
    def ended(self) -> bool:
        """True when all that was to be found was found."""
        return (self._bench is not None and self._bench.done) or (self._overflows is not None and self._overflows.left == 0)

    def begin(self, model: Models | None, step: int, rank: int | None) -> None:
        """``start()``. Hooks of the dump must be put on later than those of the replay, to see what the modules see."""
        if self.replay is not None:
            self.replay.begin(model, step, rank)
        if self.kernels is not None and self._window.wanted(step, rank):
            self.kernels.begin(step, rank)

    def pause(self) -> None:
        """``stop()``."""
        if self.replay is not None:
            self.replay.pause()
        if self.kernels is not None:
            self.kernels.pause()

    def end_step(self, next_step: int) -> None:
        """``step()``."""
        if self.replay is not None:
            self.replay.end_step(next_step)
        if self.kernels is not None:
            self.kernels.end_step()

    def close(self) -> None:
        """Take everything off."""
        if self.replay is not None:
            self.replay.close()
        if self.kernels is not None:
            self.kernels.close()

    def sink(self, sink: Sink, files: DumpSink, tensors: TensorStore | None, rank: Callable[[], int | None]) -> Sink:
        """`sink`, or one in front of it that passes on what differs from the earlier dump, or what has NaN or Inf."""
        if self._overflows is not None:
            return OverflowSink(sink, files, self._overflows, tensors, self._skip)
        return sink if self._bench is None else DifferenceSink(sink, files, self._bench, tensors, rank)
