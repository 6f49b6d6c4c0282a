"""Do the result of an operator and that of its perturbed run belong together?

Thresholds are those of the existing tool (8.1.1): ratios of corresponding elements, with small values lifted to a limit. It has three
flaws that this module has not: values that differ by the rounding of their own type only, as subnormal numbers do by 4e-3, are no
difference here (`compute_tolerance`), a value that is finite on one side only is one, and a result is not off because its input was
(`decide`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from msprobe_engine.accuracy.free_benchmark.perturb import CHANGE_VALUE, IMPROVE, NO_CHANGE, NOISE
from msprobe_engine.core.dtypes import FLOATS

Array = npt.NDArray[Any]

THRESHOLD = {"float16": 1.002, "bfloat16": 1.004}
"""Largest ratio that is consistent, by type of the original result."""
OTHERWISE = 1.0002
AMPLIFIED = 10.0
"""How much more than its input a result may move. Without it one bit of bfloat16 is reported for every matrix product."""
SMALL_GRADIENT = 1e-3
"""Values of gradients below this are lifted to it."""
_FRACTION = {name: (FLOATS[name].bits - 1, FLOATS[name].least) for name in ("float16", "bfloat16", "float32", "float64")}
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


@dataclass(frozen=True)
class Measured:
    """What two results of one shape have in common, as numbers that can be joined: large results are measured in parts, on the device
    where they are. The numbers of `fields`, in their order, are what a device hands over.

    Attributes:
        one_sided: elements that are not finite, and not the same on both sides.
        unequal: elements that are not the same; NaN is the same as NaN. For `NO_CHANGE`.
        ratio: largest ratio of two finite elements that differ by more than rounding explains (`compute_tolerance`), minus 1.
        flipped: elements, of these, that are not small and have another sign.
        change: L2 norm of the difference, over what is finite on both sides.
        size: L2 norm of the original, over the same.
        excess: largest difference of two finite elements, by the size of the element or of a typical one (`typical`), whichever is larger.
    """

    one_sided: bool = False
    unequal: bool = False
    ratio: float = 0.0
    flipped: bool = False
    change: float = 0.0
    size: float = 0.0
    excess: float = 0.0

    fields: ClassVar[int] = 9
    """one_sided, unequal, ratio, flipped, excess; then of the difference and of the original: the largest, and the sum of squares in its
    units."""

    @staticmethod
    def of(parts: Sequence[Sequence[float]]) -> Measured:
        """Join parts, each with `fields` numbers."""
        table = np.asarray(parts, np.float64).reshape(-1, Measured.fields)
        if not len(table):
            return Measured()
        one_sided, unequal, ratio, flipped, excess = table[:, :5].max(0)
        norms = norm_of(table[:, 5:7]), norm_of(table[:, 7:9])
        return Measured(one_sided > 0, unequal > 0, float(ratio), flipped > 0, *norms, float(excess))


def norm_of(parts: Sequence[Sequence[float]] | Array) -> float:
    """L2 norm of everything, from rows of (largest, sum of squares in units of it). Without overflow."""
    table = np.asarray(parts, np.float64).reshape(-1, 2)
    largest = float(table[:, 0].max(initial=0.0))
    return largest * math.sqrt(float((np.square(table[:, 0] / largest) * table[:, 1]).sum())) if largest else 0.0


def small_value(perturbed_dtype: str, mode: str, backward: bool) -> float:
    """What smaller values are lifted to before a ratio is taken; 0 for `NO_CHANGE`.

    Args:
        perturbed_dtype: type of the second result, its name in `perturb.NOISE`.
        backward: these are gradients, for an output gradient of about 1.
    """
    if mode == NO_CHANGE:
        return 0.0
    return SMALL_GRADIENT if backward else math.sqrt(NOISE.get(perturbed_dtype, NOISE["float32"]))


def _fraction(dtype: str) -> tuple[int, int]:
    return _FRACTION.get(dtype, _FRACTION["float32"])


def typical(mode: str, norm: float, count: int) -> float:
    """What an element is of, that many of which have this norm; the whole norm where the change is one of two elements alone."""
    return norm if mode == CHANGE_VALUE else norm / math.sqrt(count or 1)


def compute_tolerance(dtype: str, mode: str) -> tuple[int, int]:
    """(bits, least exponent): elements closer than ``2**(max(exponent, least) - bits)`` are the same but for the rounding of `dtype`: one
    unit of its last place, and a second one where the input was moved."""
    fraction, least = _fraction(dtype)
    return fraction - (mode != IMPROVE), least


def measure(original: Array, perturbed: Array, dtype: str, perturbed_dtype: str, mode: str, backward: bool = False) -> Measured:
    """Compare two results of one shape, see `judge`."""
    original_values, perturbed_values = original.astype(np.float64).reshape(-1), perturbed.astype(np.float64).reshape(-1)
    finite = np.isfinite(original_values) & np.isfinite(perturbed_values)
    same = (original_values == perturbed_values) | (np.isnan(original_values) & np.isnan(perturbed_values))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        before, after = original_values[finite], perturbed_values[finite]
        change, size = _norm(after - before), _norm(before)
        small = small_value(perturbed_dtype, mode, backward)
        if mode != NO_CHANGE:
            bits, least = compute_tolerance(dtype, mode)
            looked = np.abs(before - after) > np.ldexp(1.0, np.maximum(np.frexp(before)[1] - 1, least) - bits)
            before, after = before[looked], after[looked]
        flipped = mode != NO_CHANGE and bool((before * after < -small * small).any())
        usual = typical(mode, size, int(finite.sum()))
        excess = (
            float((np.abs(after - before) / np.maximum(np.abs(before), usual)).max(initial=0.0)) if usual else float(change > 0) * math.inf
        )
        return Measured(bool((~finite & ~same).any()), not same.all(), _largest(before, after, small), flipped, change, size, excess)


def decide(measured: Measured, dtype: str, mode: str, threshold: float | None = None, moved: float = 0.0) -> Judgement:
    """The verdict.

    Args:
        threshold: largest ratio that is consistent; None: that of the type.
        moved: by how much the input was moved, L2 norm of the change by its own. A result that has moved by up to `AMPLIFIED` times
            that, or half a unit of its type, is none of an ill-conditioned operator. 0: the input was not moved.
    """
    change = measured.change / measured.size if measured.size else 0.0
    max_rel = math.inf if measured.one_sided else measured.ratio
    if mode == NO_CHANGE:
        return Judgement(not measured.unequal, max_rel if measured.unequal else 0.0, False, change)
    limit = THRESHOLD.get(dtype, OTHERWISE) if threshold is None else threshold
    if moved and not measured.one_sided and measured.excess <= AMPLIFIED * max(moved, 0.5 ** (_fraction(dtype)[0] + 1)):
        return Judgement(True, max_rel, False, change)
    return Judgement(not measured.one_sided and not measured.flipped and 1.0 + measured.ratio <= limit, max_rel, measured.flipped, change)


def judge(
    original: Array, perturbed: Array, dtype: str, perturbed_dtype: str, mode: str, backward: bool = False, moved: float = 0.0
) -> Judgement:
    """Compare two results of one shape.

    Args:
        original, perturbed: values, as any float type that holds them.
        dtype, perturbed_dtype: names of the types they had (`perturb.NOISE`).
        backward: these are gradients.
        moved: see `decide`.
    """
    return decide(measure(original, perturbed, dtype, perturbed_dtype, mode, backward), dtype, mode, moved=moved)


def _norm(values: Array) -> float:
    """Without overflow: values up to the largest double are squared in units of the largest."""
    largest = float(np.abs(values).max(initial=0.0))
    return largest * float(np.sqrt(np.square(values / largest).sum())) if largest else 0.0


def _largest(before: Array, after: Array, small: float) -> float:
    """Largest ratio of two elements minus 1, whichever is the larger one."""
    if not before.size:
        return 0.0
    high, low = np.maximum(np.abs(before), np.abs(after)), np.minimum(np.abs(before), np.abs(after))
    ratio = np.maximum(high, small) / np.maximum(low, small)
    return float(np.nan_to_num(ratio, nan=1.0, posinf=np.inf).max()) - 1.0
