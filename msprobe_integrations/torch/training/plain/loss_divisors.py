"""Whether the losses of micro batches are divided by their number twice: by the loop and by what it calls."""

from __future__ import annotations

import math
from typing import Any

import torch

_LONGEST = 8
"""Operations behind a loss that are looked at."""
_SUMS = ("Add", "Sum", "Stack", "Cat", "Sub")
"""Beginnings of the names of operations whose result is divided for an average of several terms."""


class LossDivisors:
    """Looks at the numbers that a loss was divided by or multiplied with last, as the graph has them. Those on a device are not read."""

    def __init__(self) -> None:
        self._passes: list[list[float]] = []

    def backward(self, tensors: Any) -> None:
        """A backward pass of the loop begins."""
        if isinstance(tensors, (list, tuple)) and len(tensors) == 1:
            tensors = tensors[0]
        self._passes.append(_factors(tensors.grad_fn) if isinstance(tensors, torch.Tensor) else [])

    def twice(self) -> bool:
        """An update begins: has every pass of it two factors that are one over the number of passes?"""
        passes, self._passes = self._passes, []
        share = 1.0 / max(len(passes), 1)
        return share < 1.0 and all(sum(math.isclose(f, share, rel_tol=1e-6) for f in factors) > 1 for factors in passes)


def _factors(node: Any) -> list[float]:
    """Of the chain of products with a number and quotients by one that a loss ends with; without what is divided to average a sum."""
    factors: list[float] = []
    for _ in range(_LONGEST):
        name = type(node).__name__
        if not name.startswith(("Div", "Mul")):
            return factors[:-1] if factors and name.startswith(_SUMS) else factors
        other = getattr(node, "_saved_other", None)
        following = [n for n, _ in node.next_functions if n is not None]
        if len(following) != 1:
            break
        if isinstance(other, torch.Tensor) and other.numel() == 1 and other.device.type == "cpu" and not other.is_meta:
            value = float(other)
            factors.append(1.0 / value if name.startswith("Div") and value else value)
        node = following[0]
    return factors
