"""The statistics of a whole from those of its pieces.

* Max and Min are those of the piece that has the largest and the smallest element
* Mean is weighted by the number of elements, Norm the root of the sum of squares
* counts of NaN and Inf add up

A sum whose terms lie on several ranks (the output of a row-parallel product before its reduction, a gradient before it is averaged) has
no such rule but for its mean, which is the sum of the means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SAME = 1e-6
"""Replicas hold the same numbers; a collective that sums in another order on each rank moves a last bit of a float32."""


def whole_shape(first: Any, second: Any) -> list[int] | None:
    """The smallest shape that two shapes are pieces of; None when they are no pieces of one tensor.

    >>> whole_shape([4, 16, 48], [2, 16, 96])
    [4, 16, 96]
    """
    if not (isinstance(first, list) and isinstance(second, list)) or len(first) != len(second):
        return None
    shape = []
    for a, b in zip(first, second):
        if not (isinstance(a, int) and isinstance(b, int)):
            return None
        large, small = max(a, b), min(a, b)
        if large != small and (small == 0 or large % small):
            return None
        shape.append(large)
    return shape


def times(shape: Sequence[int], first: Sequence[int], second: Sequence[int], n: int) -> list[int]:
    """A shape with `n` times as much in the dimension in which two others differ, or in the first one."""
    at = next((d for d, (a, b) in enumerate(zip(first, second)) if a != b), 0)
    return [size * n if d == at else size for d, size in enumerate(shape)]


def padded(first: Any, second: Any, pieces: int) -> bool:
    """One dimension of the first, times at most `pieces`, is a bit more than the whole of the second: filled up to a round number."""
    if not (isinstance(first, list) and isinstance(second, list)) or len(first) != len(second):
        return False
    other = [(a, b) for a, b in zip(first, second) if a != b]
    if len(other) != 1:
        return False
    a, b = other[0]
    return any(b < a * n <= b + max(1024, b // 8) or a < b <= a * n for n in range(1, pieces + 1))


def needed(shape: Sequence[int], whole: Sequence[int]) -> int:
    """How many pieces of a shape make the whole."""
    return math.prod(w // s for s, w in zip(shape, whole) if s)


def merged(stats: Floats) -> Floats:
    """float64 (pieces, 4) of Max, Min, Mean, Norm of pieces of one size -> those four of the whole."""
    with np.errstate(all="ignore"):
        return np.array((stats[:, 0].max(), stats[:, 1].min(), stats[:, 2].mean(), np.sqrt(np.square(stats[:, 3]).sum())))


def close(a: Floats, b: Floats, tolerance: float = SAME) -> bool:
    """Two rows of statistics say the same."""
    if np.array_equal(a, b, equal_nan=True):
        return True
    with np.errstate(all="ignore"):
        scale = np.array((max(abs(a[0]), abs(a[1]), abs(b[0]), abs(b[1])),) * 3 + (max(abs(a[3]), abs(b[3])),))
        return bool((np.abs(a - b) <= tolerance * scale).all())


def groupings(pieces: int, need: int) -> Iterator[list[list[int]]]:
    """Ways in which pieces, by rank, make `pieces / need` replicas of one whole: a rank's replicas are its neighbours, or far away."""
    copies = pieces // need
    yield [[replica + copies * i for i in range(need)] for replica in range(copies)]
    if copies > 1 and need > 1:
        yield [[need * replica + i for i in range(need)] for replica in range(copies)]
