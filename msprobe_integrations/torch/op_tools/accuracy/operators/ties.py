"""Results that are places (of the largest value, in sorted order): among equal values any of them is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_AXIS = {
    **dict.fromkeys(("max", "min", "argmax", "argmin", "median", "nanmedian", "mode", "sort", "argsort", "msort", "cummax", "cummin"), 1),
    **dict.fromkeys(("topk", "kthvalue"), 2),
}
"""Operators whose integer result is a place, and where their axis stands."""
_WHOLE = ("max", "min", "argmax", "argmin", "median", "nanmedian")
"""Without an axis these look at all values."""
_EACH_ONCE = ("sort", "argsort", "topk")


def equally_right(api: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.Tensor, bench: torch.Tensor) -> bool:
    """Do two integer results of an operator that finds places point at equal values? Not of a stable sort: equal values keep their order.

    Args:
        args, kwargs: of the call.
        device, bench: its results, on the CPU.
    """
    api = api.removeprefix("npu_").removesuffix("_v2")
    if api not in _AXIS or kwargs.get("stable") or device.shape != bench.shape or device.dtype.is_floating_point or not device.numel():
        return False
    values = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if not isinstance(values, torch.Tensor):
        return False
    where = _AXIS[api]
    fallback = None if api in _WHOLE else -1
    axis = kwargs.get("dim", kwargs.get("axis", args[where] if len(args) > where else fallback))
    return point_at_equal(values, axis, device.long(), bench.long(), api in _EACH_ONCE)


def point_at_equal(values: torch.Tensor, axis: int | None, device: torch.Tensor, bench: torch.Tensor, each_once: bool) -> bool:
    """Do two tensors of places along `axis` (None: in all values) point at equal values?

    Args:
        each_once: no place may stand twice in a row.
    """
    if axis is None:
        values, axis, device, bench = values.reshape(-1), 0, device.reshape(-1), bench.reshape(-1)
    elif device.dim() < values.dim():
        device, bench = device.unsqueeze(axis), bench.unsqueeze(axis)
    size = values.shape[axis] if values.dim() else 1
    if device.dim() != values.dim() or any(bool(((p < 0) | (p >= size)).any()) for p in (device, bench)):
        return False
    if each_once and bool((device.sort(axis).values.diff(dim=axis) == 0).any()):
        return False
    target, golden = values.gather(axis, device), values.gather(axis, bench)
    return bool(((target == golden) | ((target != target) & (golden != golden))).all())
