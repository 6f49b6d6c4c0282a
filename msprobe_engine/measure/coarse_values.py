"""Numbers in float32 that have no more bits than those of a shorter type: they were rounded to it on their way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]

_LOST = {"bfloat16": 16, "float16": 13}
"""Bits at the end of the mantissa of float32 that a type has not."""

CHANCE = 1e-6
"""So rarely all numbers of one run have few bits by chance, where those of the other one have them as often as they do: a sum of two
numbers of a short type often is one itself."""


def coarse(values: npt.NDArray[np.float64], kind: str) -> Bools:
    """Numbers, not zero, that a type has: ``bfloat16`` or ``float16``."""
    with np.errstate(all="ignore"):
        short = values.astype(np.float32)
    bits = short.view(np.uint32) & np.uint32((1 << _LOST[kind]) - 1)
    representable: Bools = np.isfinite(values) & (values != 0) & (short == values) & (bits == 0)
    return representable


def rounded_on_one_side(target: npt.NDArray[np.float64], golden: npt.NDArray[np.float64]) -> tuple[str, bool] | None:
    """The type that all tensors in float32 of one run were rounded to and those of the other one were not, and whether it is the target
    that was; None: neither, or not enough tensors to tell.

    Args:
        target, golden: float64 (tensors, 2), largest and smallest element of the same tensors.
    """
    used = ((golden != 0) & (target != 0) & np.isfinite(golden) & np.isfinite(target)).all(1)
    for kind in _LOST:
        coarse_target, coarse_golden = (coarse(numbers[used], kind) for numbers in (target, golden))
        for short, other in ((coarse_target, coarse_golden), (coarse_golden, coarse_target)):
            often = (other.sum() + 1) / (other.size + 1)
            if short.size and short.all() and often**other.size < CHANCE:
                return kind, short is coarse_target
    return None
