"""The short way of `TorchBackend.reduce` for tensors on a device whose like has been seen: no operator of torch runs, no object of torch is
made, and the kernel is started by addresses, for small tensors of a `batched` block by one launch for all of a type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import ref as weak

import torch

from msprobe_engine.core.records import TensorDescription, TensorRef
from msprobe_integrations.torch.statistics.device.batch import SMALL, Batch
from msprobe_integrations.torch.statistics.device_rows import DeviceRows
from msprobe_integrations.torch.statistics.pending import Step
from msprobe_integrations.torch.statistics.rows import LAUNCHERS

if TYPE_CHECKING:
    from msprobe_integrations.torch.statistics.device.launch import Launcher, Numbers

_new = tuple.__new__


class DeviceReduce:
    """The part of `TorchBackend` that starts kernels of `device.launch` without preparations."""

    _step: Step
    _want: int
    _reduce_any: Callable[[Step, Any], TensorRef]
    _batch: Batch | None = None
    unsupported: dict[str, int]

    @contextmanager
    def batched(self) -> Iterator[None]:
        """Rows of small tensors on a device that are reduced inside of the block, in this thread, are written at its end, by one launch
        for all tensors of a type. Nothing inside may write to a tensor that has been reduced there. Rows are the same as without."""
        if self._batch is not None:
            yield
            return
        batch = self._batch = Batch(self._count_unsupported)
        try:
            yield
        finally:
            self._batch = None
            batch.launch()

    def _count_unsupported(self, why: str) -> None:
        self.unsupported[why] = self.unsupported.get(why, 0) + 1

    def _start(
        self,
        launcher: Launcher,
        direct: Callable[..., None],
        aligned: int,
        line: Numbers,
        stream: int,
        rows: DeviceRows,
        *kept: torch.Tensor,
    ) -> None:
        """Write the row of a line of `Batch.add`, with the batch where there is one, else now. `kept`: what the addresses are of."""
        batch = self._batch
        if batch is None or line[2] > SMALL or not batch.add(launcher, aligned, line, stream, rows, *kept):
            try:
                data, row, n, *second = line
                launcher.start(direct, (data, *second[:1]), n, row, launcher.numbers(line), stream)
            except Exception as error:
                launcher.note_failure(error)
                raise

    def _reduce_on_device(self, step: Step, tensor: torch.Tensor, version: int, pointer: int, description: TensorDescription) -> TensorRef:
        """The row of a plain tensor, known by type, shape, dtype and device. May raise before anything has been started; what it cannot
        do goes the long way."""
        launcher = LAUNCHERS[tensor.device, tensor.dtype].get(self._want)
        if launcher is not None and tensor.is_contiguous() and not tensor.is_neg():
            n = tensor.numel()
            aligned = pointer % 16 == 0
            direct = launcher.find(aligned, n)
            rows = step.devices.get(launcher.key)
            # memory that has been freed: of a view there still is an address, its offset
            if direct is not None and rows is not None and pointer > tensor.storage_offset() * tensor.element_size():
                stream = launcher.stream()
                if stream >= 0:
                    row = next(step.numbers)
                    address = rows.take_address(tensor, row, n, launcher.flags, stream)
                    self._start(launcher, direct, aligned, (pointer, address, n), stream, rows, tensor)
                    made: TensorRef = _new(TensorRef, (row, description))
                    step.seen[id(tensor)] = (weak(tensor), version, made, 0, 0, 0)
                    return made
        return self._reduce_any(step, tensor)
