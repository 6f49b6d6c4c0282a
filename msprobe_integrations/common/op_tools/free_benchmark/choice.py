"""Which calls the free benchmark looks at, and what becomes of its verdicts."""

from __future__ import annotations

from msprobe_engine.accuracy.free_benchmark.judge import Judgement
from msprobe_engine.accuracy.free_benchmark.table import FreeBenchmarkTable
from msprobe_engine.core.settings.schema import FreeBenchmarkSettings
from msprobe_integrations.common.capture.calls import Numbering
from msprobe_integrations.common.capture.filters import BACKWARD, FORWARD, RecordFilter

PART = "free benchmark"
"""Its name in messages about faults."""


class Choice:
    """Counts calls as dumps do, and knows which are wanted.

    Args:
        kept: which calls; None: all.
        table: where results go.
    """

    def __init__(self, settings: FreeBenchmarkSettings, kept: RecordFilter | None, table: FreeBenchmarkTable) -> None:
        self.mode, self.fix = settings.pert_mode, settings.handler_type == "fix"
        self.stage, self.backward = settings.fuzz_stage, settings.fuzz_stage == "backward"
        self.kept, self.table = kept, table
        self._numbers = Numbering()
        self.step = 0
        self.rank: int | None = None

    def name(self, base: str) -> tuple[str, bool]:
        """Name of the next call of an API, and whether it is wanted. Every call of the step is told here, for their numbers."""
        name = f"{base}.{self._numbers.take_number(base)}"
        kept = self.kept
        if kept is None:
            return name, True
        forward, backward = f"{name}.forward", f"{name}.backward"
        started, ended = kept.starts(forward), kept.ends(forward)
        directions = FORWARD | BACKWARD if self.backward else FORWARD
        return name, started and ended and bool(kept.directions(kept.api(base), forward, backward) & directions)

    def add_result(self, base: str, name: str, judgement: Judgement, input_change: float, dtype: str, shape: str, place: str) -> None:
        """A result was compared: it is counted, and has a row when it is not consistent.

        Args:
            base: API without a number.
            name: of the call.
            input_change: by how much the input was changed, relative to its size.
            dtype, shape: of the original result, as the framework prints them.
            place: which of several results.
        """
        self.table.get_counts(base).add(judgement, input_change)
        if not judgement.consistent:
            self.table.row(self.rank, self.mode, self.stage, self.step, name, judgement, dtype, shape, place)

    def end_step(self) -> None:
        """Calls are counted anew."""
        self._numbers.reset()
        if self.kept is not None:
            self.kept.end_step()
