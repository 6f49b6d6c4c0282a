"""Values of torch as the verdict takes them: numpy arrays and the names of their types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def as_array(value: Any, *, share: bool = False) -> Any:
    """A tensor as an array of its own on the host, of types that numpy has not the next wider one; other values as they are.

    Args:
        share: the array may have the memory of the tensor, which is nobody else's.
    """
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().resolve_conj().resolve_neg()
    if tensor.dtype.is_floating_point and (tensor.dtype.itemsize == 1 or tensor.dtype is torch.bfloat16):
        tensor = tensor.float()
    elif tensor.dtype is torch.complex32:
        tensor = tensor.to(torch.complex64)
    array: np.ndarray[Any, Any]
    if (share or tensor.dtype != value.dtype) and tensor.device.type == "cpu" and tensor.layout is torch.strided:
        array = tensor.contiguous().numpy()
    else:  # memory that an array of numpy shares cannot be resized any more, which sharded training does with its parameters
        array = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor).numpy()
    return array


def kind_of(value: Any) -> str:
    """Name of the type: ``"torch.float32"``, ``"int"``."""
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
