"""Rows of one step on their way to the host."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import _disable_current_modes

from msprobe_engine.core.records import TensorRef
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows
from msprobe_integrations.common.statistics.row_memory import MemoryPool, RowBuffer
from msprobe_integrations.torch.statistics.capture_mode import relax_capture_mode
from msprobe_integrations.torch.statistics.checksums import Staging
from msprobe_integrations.torch.statistics.device_rows import DeviceRows
from msprobe_integrations.torch.statistics.streams import host_memory, side_stream, wait_for

_dispatch_modes = torch._C._len_torch_dispatch_stack
_NoFunction = torch._C.DisableTorchFunction


@contextmanager
def quiet() -> Iterator[None]:
    """Run operators unseen: by autograd, by function and dispatch modes of the user and by our own capture."""
    with _NoFunction(), torch.no_grad():
        if _dispatch_modes():
            with _disable_current_modes():
                yield
        else:
            yield


Seen = tuple[Any, int, TensorRef, int, int, int]
"""What a row was made of: a weak reference to the tensor, its version, the row, and on the host address, bytes and sample of its memory."""


class LateScale(dict[str, Any]):
    """``{"min": ..., "max": ...}`` of the scales of a quantized tensor, filled when the rows of the step are on the host."""

    def set_range(self, row: Rows) -> None:
        """`row`: that of the scales, [16]."""
        found = _rows.read_row(row)
        for key, number in (("min", found.min), ("max", found.max)):
            self[key] = number if number is None or math.isfinite(number) else str(number)

    def __repr__(self) -> str:
        return f"{super().__repr__()} at {id(self)}"  # descriptions that are equal as text are one object


class Step:
    """Everything of one step. A late thread that still holds an old step writes where nobody else does."""

    def __init__(self, pool: MemoryPool, capacity: int) -> None:
        self.numbers: Iterator[int] = itertools.count()
        self.host = RowBuffer(pool, capacity)
        self.devices: dict[Any, DeviceRows] = {}
        self.staging: dict[Any, Staging] = {}
        self.crcs: dict[int, int] = {}
        self.seen: dict[int, Seen] = {}
        self.scales: list[tuple[LateScale, int]] = []
        self.lock = threading.Lock()


class _Copy:
    """One device's rows on their way to the host."""

    def __init__(self, source: DeviceRows) -> None:
        self.source = source
        self.event: Any = None
        self.host: torch.Tensor | None = None
        self.device_rows: torch.Tensor | None = None
        module = getattr(torch, source.device.type, None)
        if source.device.type != "cpu" and hasattr(module, "Stream") and not getattr(type(source.chunks[0]), "probe_device", False):
            self._start(module)
        else:
            self.device_rows = source.join_rows()

    def _start(self, module: Any) -> None:
        """Pinned copy on a side stream that follows every stream the rows were written on."""
        source = self.source
        with module.device(source.device):
            side = side_stream(module, source.device)
            for stream in {*source.streams, module.current_stream(source.device)}:
                side.wait_stream(stream)
            with module.stream(side):
                self.device_rows = rows = source.join_rows()  # not before the waits: it reads the rows to put them together
                self.host = host_memory(rows.shape, rows.dtype)
                self.host.copy_(rows, non_blocking=True)
                self.event = module.Event()
                self.event.record(side)
            rows.record_stream(side)
            for chunk in source.chunks:
                chunk.record_stream(side)

    def ready(self) -> bool:
        if self.event is None:
            return True
        relax_capture_mode()
        return bool(self.event.query())

    def arrive(self) -> npt.NDArray[np.int64]:
        if self.event is not None:
            wait_for(self.event)
        if self.host is None:
            assert self.device_rows is not None
            self.host = self.device_rows.cpu()
        host, self.device_rows = self.host, None
        self.source.chunks.clear()
        array: npt.NDArray[np.int64] = host.numpy()
        return array


class TorchPendingRows:
    """`PendingRows` of one step."""

    def __init__(self, step: Step, n: int) -> None:
        self._rows: Rows | None = None
        self._step: Step | None = step
        self._n = n
        self._copies = [_Copy(rows) for rows in step.devices.values() if rows.places]
        for staging in step.staging.values():
            staging.close()

    def ready(self) -> bool:
        """True when `rows` will not wait."""
        return all(copy.ready() for copy in self._copies) and (
            self._step is None or all(staging.ready() for staging in self._step.staging.values())
        )

    def rows(self) -> Rows:
        """[n, 16] float64. The memory is not used again while the array, or a view of it, exists."""
        if self._rows is None:
            assert self._step is not None
            out = self._step.host.rows(self._n)
            if self._copies:
                with quiet():
                    for copy in self._copies:
                        copy.source.scatter(copy.arrive(), out)
                    for staging in self._step.staging.values():
                        self._step.crcs.update(staging.results())
                _put_crcs(self._step.crcs, out)
            for scale, row in self._step.scales:
                scale.set_range(out[row])
            self._rows, self._step, self._copies = out, None, []
        return self._rows


def _put_crcs(crcs: dict[int, int], out: Rows) -> None:
    ints = _rows.as_int64(out)
    for row, crc in crcs.items():
        ints[row, _rows.CRC] = crc
        ints[row, _rows.FLAGS] |= _rows.HAS_CRC
