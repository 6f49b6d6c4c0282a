"""A digest of the integers that the models of a step are called with: which batch it had."""

from __future__ import annotations

import torch

from msprobe_engine.core import redaction
from msprobe_engine.core.records import BATCH_DIGEST

_TENSORS = 16
_INTEGERS = 1 << 22
"""Of more tensors in a call, or of a larger one, nothing is read, and the step has no digest."""
_BITS = 24
"""Of the digest, a number between 0 and 1: curves and rules have no trouble with its size, and float32 holds it."""
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), which mixes the bits of a number."""


class BatchDigest:
    """The sum of a hash of each sample: neither their order in the step nor how they are cut into micro batches matters, nor the width of
    the integers. Nothing is read of a device: the sum stays on it."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._cut = False

    def add(self, tensors: list[torch.Tensor]) -> None:
        """What a model is called with."""
        if redaction.active() is not None:  # there are few batches of a few tokens: they could be guessed
            return
        integers = [tensor for tensor in tensors if _holds_integers(tensor)]
        self._cut |= len(integers) > _TENSORS or any(tensor.numel() > _INTEGERS for tensor in integers)
        for place, tensor in enumerate([] if self._cut else integers):
            digest = _digest_of_samples(tensor, place)
            self._sum = digest if self._sum is None else self._sum.to(digest.device) + digest

    def finish(self) -> dict[str, torch.Tensor]:
        """Number `BATCH_DIGEST` of the step that ends; none where it had no integers, or not all of them were looked at."""
        total, cut = self._sum, self._cut
        self._sum, self._cut = None, False
        return {} if total is None or cut else {BATCH_DIGEST: (total & ((1 << _BITS) - 1)).float() / (1 << _BITS)}


def _holds_integers(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


def _digest_of_samples(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """int64, one number: the sum of a hash of each row; what has one dimension is one row. `place`: of the tensor among those of a call."""
    values = tensor.detach().to(torch.int64)
    rows = values.reshape(values.shape[0], -1) if values.dim() > 1 else values.reshape(1, -1)
    places = torch.arange(1, rows.shape[1] + 1, device=rows.device) + _signed(_MULTIPLIERS[0]) * (place + 1) % (1 << 62)
    return _mix(_mix(rows + _mix(places)).sum(1)).sum()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """As SplitMix64, with a shift that keeps the sign; numbers wrap around."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS[1:]):
        x = (x ^ (x >> shift)) * _signed(multiplier)
    return x ^ (x >> 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
