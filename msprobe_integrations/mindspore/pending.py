"""Rows of one step on their way to whoever reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from msprobe_engine.records import TensorRef
from msprobe_engine.rows import Rows
from msprobe_integrations.common.row_memory import MemoryPool, RowBuffer


class Step:
    """The rows of one step. A late thread that still holds an old step writes where nobody else does."""

    def __init__(self, pool: MemoryPool, capacity: int) -> None:
        self.numbers: Iterator[int] = itertools.count()
        self.host = RowBuffer(pool, capacity)
        self.seen: dict[tuple[int, int, int], TensorRef] = {}


class HostRows:
    """`msprobe_engine.backend.PendingRows` of rows that are on the host."""

    def __init__(self, step: Step, n: int) -> None:
        self._step, self._n = step, n

    def ready(self) -> bool:
        """Always: the rows are here."""
        return True

    def rows(self) -> Rows:
        """[n, 16] float64. The memory is not used again while the array, or a view of it, exists."""
        return self._step.host.rows(self._n)
