"""Values of torch as the verdict takes them: numpy arrays and the names of their types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from msprobe_engine.accuracy.judge import judge
from msprobe_engine.accuracy.results import TensorResult


def as_array(value: Any) -> Any:
    """A tensor as an array on the host, types that numpy has not widened to float32; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().resolve_conj().resolve_neg().cpu()
    if value.dtype.is_floating_point and (value.dtype.itemsize == 1 or value.dtype is torch.bfloat16):
        value = value.float()
    return value.numpy()


def kind_of(value: Any) -> str:
    """Name of the type: ``"torch.float32"``, ``"int"``."""
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def compared(api: str, name: str, bench: Any, device: Any, changed: Iterable[Any] = (), second: Any = None) -> TensorResult:
    """`judge` for two values of torch; results of another shape among `changed` are left out."""
    arrays = [as_array(c) for c in changed if isinstance(c, torch.Tensor) and isinstance(bench, torch.Tensor) and c.shape == bench.shape]
    other = as_array(second) if isinstance(second, torch.Tensor) else None
    return judge(api, name, as_array(bench), as_array(device), kind_of(bench), kind_of(device), changed=arrays, second=other)
