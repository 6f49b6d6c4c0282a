"""Norms of numbers so small that their squares are no normal numbers: kernels that do not scale first have lost them, on any device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_NORMS = frozenset(("norm", "vector_norm", "matrix_norm", "_foreach_norm", "dist"))


def lost_in_squares(api: str, inputs: Iterable[torch.Tensor], device: torch.Tensor, bench: torch.Tensor) -> bool:
    """Are all differences of two results of a norm no more than what squares below the smallest normal number make?

    Args:
        api: last part of the operator's name.
        inputs: of the call; the largest says of how many squares a result may be the sum.
        device, bench: results, on the CPU; the type of `device` is that of the squares.
    """
    sizes = [t.numel() for t in inputs]
    if api not in _NORMS or not sizes or device.shape != bench.shape or not device.dtype.is_floating_point:
        return False
    lost = max(sizes) * torch.finfo(torch.float32 if device.dtype.itemsize < 4 else device.dtype).smallest_normal
    return bool(((device.double().square() - bench.double().square()).abs() <= lost).all())
