"""Task free_benchmark with torch: calls are taken where a dump at level L1 sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.free_benchmark.preheat import Preheat
from msprobe_engine.accuracy.free_benchmark.table import FreeBenchmarkTable
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.formats.dump.layout import rank_directory
from msprobe_integrations.common.capture.filters import record_filter
from msprobe_integrations.common.op_tools.free_benchmark.choice import Choice
from msprobe_integrations.common.op_tools.free_benchmark.run import FreeBenchmarkRun
from msprobe_integrations.torch.hooks.graph_tasks import current_graph_task
from msprobe_integrations.torch.op_tools.free_benchmark.api_mode import ApiMode
from msprobe_integrations.torch.op_tools.free_benchmark.checker import Checker


class FreeBenchmark(FreeBenchmarkRun):
    """See `FreeBenchmarkRun`. Rows of a step are in ``step{N}/rank{R}/free_benchmark.csv``."""

    def __init__(self, dump: DumpSettings, root: Path, faults: Faults) -> None:
        super().__init__(dump, root, faults, FreeBenchmarkTable(root, "pert_mode"))
        self._choice = Choice(self.settings, record_filter(self.dump, current_graph_task), self.table)
        preheat = Preheat(self.settings.preheat_step, self.settings.max_sample) if self.settings.if_preheat else None
        self._checker = Checker(self._choice, faults, dump.memory_budget_mb << 20, preheat)
        self.api = ApiMode(self._checker, faults)
        self._seen = False

    def take_calls(self, _model: Any, step: int, rank: int | None) -> None:
        self._choice.step, self._choice.rank = step, rank
        self._seen = True
        self.api.open()

    def leave_calls(self) -> None:
        self.api.close()

    def finish(self) -> None:
        if self._seen:
            self._seen = False
            self._checker.end_step()

    def place(self) -> str:
        return f"step{self._choice.step}/{rank_directory(self._choice.rank)}"
