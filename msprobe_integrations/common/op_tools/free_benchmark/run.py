"""Task free_benchmark beside the calls of the debugger: in which steps and on which ranks calls are taken, and what is written."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.free_benchmark.table import FreeBenchmarkTable
from msprobe_engine.core import log
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.schema import DumpSettings, FreeBenchmarkSettings
from msprobe_engine.core.window import Window
from msprobe_integrations.common.dump.dump_plugins import DumpPlugin
from msprobe_integrations.common.op_tools.free_benchmark.choice import PART


class FreeBenchmarkRun(DumpPlugin):
    """An `DumpPlugin` in the place of a dump. Frameworks inherit, and say how calls are taken.

    Args:
        dump: settings with task free_benchmark.
    """

    def __init__(self, dump: DumpSettings, root: Path, faults: Faults, table: FreeBenchmarkTable) -> None:
        self.settings = dump.free_benchmark or FreeBenchmarkSettings()
        self.dump = replace(dump, risk_level="ALL")
        self.root = root
        self.faults = faults
        self.table = table
        self.on = False
        self._window = Window(dump.rank, dump.step)
        self._rank: int | None = None
        self._closed = False

    @abstractmethod
    def take_calls(self, model: Any, step: int, rank: int | None) -> None:
        """Look at the calls of this thread from now on."""

    @abstractmethod
    def leave_calls(self) -> None:
        """Look at no further call."""

    @abstractmethod
    def finish(self) -> None:
        """The calls of the step are over: judge what waits, count calls anew."""

    def place(self) -> str:
        """Directory of the step's rows, below that of the table."""
        return ""

    def begin(self, model: Any, step: int, rank: int | None) -> None:
        """``start()``."""
        self._rank = rank
        if self._window.is_wanted(step, rank) and self.faults.is_enabled(PART):
            with self.faults.guard(PART):
                self.take_calls(model, step, rank)
                self.on = True

    def pause(self) -> None:
        self.on = False
        self.leave_calls()

    def end_step(self, next_step: int) -> None:  # noqa: ARG002
        self.pause()
        with self.faults.guard(PART):
            self.finish()
            self.table.flush(self.place())

    def close(self) -> None:
        """Write what is there, and say what was found, once."""
        if self._closed:
            return
        self._closed = True
        self.end_step(0)
        with self.faults.guard(PART):
            path = self.table.summary(self._rank)
            if path is None:
                log.warning(
                    "free benchmark: no call of an API was looked at; see that start() is before the forward pass, and at rank, step, list"
                )
            else:
                log.info(f"{self.table.text()}; all operators: {path}")
