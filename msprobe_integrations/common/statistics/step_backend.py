"""The rows of the step in progress, as the backends of all frameworks have them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from msprobe_engine.core import log
from msprobe_engine.core.records import TensorDescription, TensorRef
from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics.rows import Rows
from msprobe_integrations.common.statistics.row_memory import MemoryPool
from msprobe_integrations.common.statistics.row_options import RowOptions

FIRST_CAPACITY = 1024


class StepBackend(RowOptions):
    """Has the step that rows are written to.

    Attributes:
        unsupported: how often a tensor got no row, reason to count (``meta``, ``not initialised``, ``no kernel: <dtype>``, ...).
    """

    step_type: ClassVar[type[Any]]
    """The class of a framework's steps."""

    def __init__(self, *, digest: bool = False) -> None:
        self._want = host_kernel.WANT_DIGEST if digest else 0
        self.unsupported: dict[str, int] = {}
        self._said: set[str] = set()
        self._pool = MemoryPool()
        self._capacity = FIRST_CAPACITY
        self._step = self.step_type(self._pool, self._capacity)

    def _without(self, description: TensorDescription, why: str) -> TensorRef:
        self.unsupported[why] = self.unsupported.get(why, 0) + 1
        kind, is_fault, _ = why.partition(": ")
        if is_fault and kind not in self._said:  # what is only empty, freed or meta has no colon
            self._said.add(kind)
            log.warn_once(f"statistics {kind}", f"some tensors have no statistics, their rows have no numbers: {why}; said once")
        return TensorRef(-1, description)

    def blank_row(self) -> int:
        """A row of this step without statistics, for a tensor that has bytes but no kernel that reads them."""
        row: int = next(self._step.numbers)
        self._step.host.clear(row)
        return row

    def exchange(self, kept: Any = None) -> Any:
        """Put the rows of the step in progress aside and go on with `kept`, a former result of this call (None: with none)."""
        old, self._step = self._step, kept or self.step_type(self._pool, self._capacity)
        old.seen.clear()  # what it has seen may change before it comes back
        return old

    def _end_step(self) -> tuple[Any, int]:
        """The step that is over, and how many rows it has; the next one begins."""
        step = self._step
        n = next(step.numbers)
        self._capacity = max(FIRST_CAPACITY, min(2 * n, n + 4096))
        self._step = self.step_type(self._pool, self._capacity)
        step.seen.clear()
        return step, n

    def _host_rows_so_far(self) -> Rows:
        """A copy of the rows that are on the host, [n, 16]."""
        step = self._step
        n = next(step.numbers)
        step.host.clear(n)  # this number is taken now
        found: Rows = np.array(step.host.rows(n))
        return found
