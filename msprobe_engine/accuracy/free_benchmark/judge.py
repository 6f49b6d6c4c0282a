"""Do the result of an operator and that of its perturbed run belong together?

Thresholds are those of the existing tool (8.1.1): ratios of corresponding elements, with small values lifted to a limit. It has two
flaws that this module has not: values that differ by the rounding of their own type only, as subnormal numbers do by 4e-3, are no
difference here (`_floor`), and a value that is finite on one side only is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.accuracy.free_benchmark.perturb import IMPROVE, NO_CHANGE, NOISE

Array = npt.NDArray[Any]

THRESHOLD = {"float16": 1.002, "bfloat16": 1.004}
"""Largest ratio that is consistent, by type of the original result."""
OTHERWISE = 1.0002
SMALL_GRADIENT = 1e-3
"""Values of gradients below this are lifted to it."""
_FRACTION = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126), "float64": (52, -1022)}
"""Bits of the fraction and exponent of the smallest normal number."""


@dataclass(frozen=True)
class Judgement:
    """What came of one result.

    Attributes:
        consistent: nothing to report.
        max_rel: largest ratio minus 1; infinite where one side is not finite.
        flipped: a value that is not small has another sign.
        change: L2 norm of the difference by that of the original, over what is finite on both sides.
    """

    consistent: bool
    max_rel: float
    flipped: bool
    change: float


def judge(original: Array, perturbed: Array, dtype: str, perturbed_dtype: str, mode: str, backward: bool = False) -> Judgement:
    """Compare two results of one shape.

    Args:
        original, perturbed: values, as any float type that holds them.
        dtype, perturbed_dtype: names of the types they had (`perturb.NOISE`).
        mode: of the perturbation.
        backward: these are gradients.
    """
    a, b = original.astype(np.float64).reshape(-1), perturbed.astype(np.float64).reshape(-1)
    finite = np.isfinite(a) & np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    one_sided = bool((~finite & ~same).any())
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        x, y = a[finite], b[finite]
        change = _norm(y - x) / norm if (norm := _norm(x)) else 0.0
        if mode == NO_CHANGE:
            equal = bool(same.all())
            return Judgement(equal, math.inf if one_sided else 0.0 if equal else _largest(x, y, 0.0), False, change)
        small = SMALL_GRADIENT if backward else math.sqrt(NOISE.get(perturbed_dtype, NOISE["float32"]))
        looked = np.abs(x - y) > _floor(x, dtype, 1 if mode == IMPROVE else 2)
        x, y = x[looked], y[looked]
        flipped = bool((x * y < -small * small).any())
        ratio = _largest(x, y, small)
    threshold = THRESHOLD.get(dtype, OTHERWISE)
    consistent = not one_sided and not flipped and 1.0 + ratio <= threshold
    return Judgement(consistent, math.inf if one_sided else ratio, flipped, change)


def _norm(values: Array) -> float:
    """Without overflow: values up to the largest double are squared in units of the largest."""
    largest = float(np.abs(values).max(initial=0.0))
    return largest * float(np.sqrt(np.square(values / largest).sum())) if largest else 0.0


def _largest(x: Array, y: Array, small: float) -> float:
    """Largest ratio of two elements minus 1, whichever is the larger one."""
    if not x.size:
        return 0.0
    high, low = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
    ratio = np.maximum(high, small) / np.maximum(low, small)
    return float(np.nan_to_num(ratio, nan=1.0).max()) - 1.0


def _floor(values: Array, dtype: str, units: int) -> Array:
    """What rounding to the type can make of a value: `units` of its last place, also of a subnormal one."""
    fraction, least = _FRACTION.get(dtype, _FRACTION["float32"])
    exponent = np.frexp(values)[1] - 1
    unit: Array = np.ldexp(1.0, np.maximum(exponent, least) - fraction)
    return units * unit
