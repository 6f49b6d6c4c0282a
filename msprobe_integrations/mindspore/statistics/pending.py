"""Rows of one step on their way to whoever reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from msprobe_engine.core.records import TensorRef
from msprobe_engine.core.statistics.rows import Rows
from msprobe_integrations.common.statistics.row_memory import MemoryPool, RowBuffer
from msprobe_integrations.mindspore.statistics.device_rows import DeviceRows


class Step:
    """The rows of one step. A late thread that still holds an old step writes where nobody else does."""

    def __init__(self, pool: MemoryPool, capacity: int) -> None:
        self.numbers: Iterator[int] = itertools.count()
        self.host = RowBuffer(pool, capacity)
        self.devices = DeviceRows()
        self.seen: dict[tuple[int, int, int], tuple[TensorRef, bytes]] = {}


class MindSporePendingRows:
    """`msprobe_engine.core.backend.PendingRows` of one step."""

    def __init__(self, step: Step, n: int) -> None:
        self._step, self._n = step, n
        self._rows: Rows | None = None
        if step.devices:
            step.devices.send()

    def ready(self) -> bool:
        """True when `rows` will not wait."""
        return self._rows is not None or self._step.devices.ready()

    def rows(self) -> Rows:
        """[n, 16] float64. The memory is not used again while the array, or a view of it, exists."""
        if self._rows is None:
            out = self._step.host.rows(self._n)
            if self._step.devices:
                self._step.devices.scatter(out)
            self._rows = out
        return self._rows
