"""Values of torch as the verdict takes them: numpy arrays and the names of their types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def as_array(value: Any) -> Any:
    """A tensor as an array of its own on the host, of types that numpy has not the next wider one; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().resolve_conj().resolve_neg()
    if value.dtype.is_floating_point and (value.dtype.itemsize == 1 or value.dtype is torch.bfloat16):
        value = value.float()
    elif value.dtype is torch.complex32:
        value = value.to(torch.complex64)
    # a copy: memory that an array of numpy shares cannot be resized any more, which sharded training does with its parameters
    array: np.ndarray[Any, Any] = torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value).numpy()
    return array


def kind_of(value: Any) -> str:
    """Name of the type: ``"torch.float32"``, ``"int"``."""
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
