"""The short way of `TorchBackend.reduce` for tensors on a device whose like has been seen: no operator of torch runs, no object of torch is
made, and the kernel is started by addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref as weak

import torch

from msprobe_engine.records import TensorDescription, TensorRef
from msprobe_integrations.torch.pending import Step
from msprobe_integrations.torch.statistics import LAUNCHERS

_new = tuple.__new__


class DeviceReduce:
    """The part of `TorchBackend` that starts kernels of `device_launch` without preparations."""

    _want: int
    _reduce_any: Callable[[Step, Any], TensorRef]

    def _reduce_on_device(self, step: Step, tensor: torch.Tensor, version: int, pointer: int, description: TensorDescription) -> TensorRef:
        """The row of a plain tensor, known by type, shape, dtype and device. May raise before anything has been started; what it cannot
        do goes the long way."""
        launcher = LAUNCHERS[tensor.device, tensor.dtype].get(self._want)
        if launcher is not None and tensor.is_contiguous() and not tensor.is_neg():
            n = tensor.numel()
            direct = launcher.find(pointer, n)
            rows = step.devices.get(launcher.key)
            # memory that has been freed: of a view there still is an address, its offset
            if direct is not None and rows is not None and pointer > tensor.storage_offset() * tensor.element_size():
                stream = launcher.stream()
                if stream >= 0:
                    row = next(step.numbers)
                    address = rows.take_address(tensor, row, n, launcher.flags, stream)
                    try:
                        launcher.start(direct, pointer, n, address, stream)
                    except Exception as error:
                        launcher.failed(error)
                        raise
                    made: TensorRef = _new(TensorRef, (row, description))
                    step.seen[id(tensor)] = (weak(tensor), version, made, 0, 0, 0)
                    return made
        return self._reduce_any(step, tensor)
