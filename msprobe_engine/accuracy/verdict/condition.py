"""How large is an error in units of what round-off makes of it, given the condition of the operator?

The bench runs again on inputs that are changed by one unit of round-off each. What comes of that, s, is the smallest error that can be
asked of a kernel: another kernel, as good as can be, computes the result of inputs that are a little wrong. With the result b, the type's
round-off u_T and that of the type in which a kernel should compute, u_a (float32 for narrower types, else the type itself), an error of
element i is

    units_i = max(0, |d_i - b_i| - u_T |b_i|) / (u_a |b_i| + s_i u_a / u_in)

(with the smallest normal number of the type in place of a smaller |b_i| in the divisor),
what the rounding of the output leaves over, by what the rounding of intermediate results makes. A kernel that computes in bfloat16 what
should be computed in float32 has 65536 units, whatever the operator; one that rounds its output alone has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import FLOAT32, FloatType

Array = npt.NDArray[Any]

NEIGHBOURS, SHARE = 4, 0.25
"""A change may happen to cancel in one element: it has at least this share of the largest scale among so many elements to each side."""
OF_ALL = 0.5
"""Values that are small beside the others may be differences of large ones (the tail of gelu): every element has at least the scale of
this share of the root mean square of all."""
JUMP = 64.0
"""An operator that amplifies a change more than this jumps there (a tie, a step): the device may stand on either side."""
UNMEASURED = 8.0
"""Condition that is assumed where none was measured, of the element and of the tensor's root mean square."""
BIASED = 16
"""A mean of signed errors is taken of so many elements at least."""
BIAS = 1.5
"""Largest sum of all signed errors, by that of one round-off of each element, in the same direction."""
CONSTANT, CONSTANTS, SPREAD, SHIFT = 1.0, 1.75, 4.0, 3.0
"""Of many elements less is right: one round-off of each (results that are all alike; in several kernels also a factor that is rounded), so
many standard deviations of round-off that goes both ways, and so many times the sum by which changed inputs move the result."""
ALIKE = 0.5
"""Intermediate values that are all alike are rounded alike: this share of what changes make, beyond one round-off of each."""
MOST = 0.95
AT_ONCE = 1 << 17
"""Elements that are looked at at a time: more do not fit into the caches."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Errors of the elements that are finite on both sides.

    Attributes:
        units: the largest.
        typical: root mean square of all.
        most: so many units have 95 % of the elements at most when neither neighbours nor all elements together are an excuse.
        mean: sum of the signed errors (device further from zero than the bench: positive) by that of the round-off of the elements;
            0 for types that compute in themselves, and where there are fewer than `BIASED` elements that are not zero.
        bias: the same by the most that rounding the output can make; above 1 in size it is a bias.
        drift: the same by the most that rounding the inputs and intermediate results to that type can make as well.
        at: flat index of the largest.
        error: absolute error there.
    """

    units: float = 0.0
    typical: float = 0.0
    most: float = 0.0
    mean: float = 0.0
    bias: float = 0.0
    drift: float = 0.0
    at: int = 0
    error: float = 0.0


def internal(kind: FloatType) -> FloatType:
    """The type in which a kernel with results of `kind` should compute."""
    return FLOAT32 if kind.bits < FLOAT32.bits else kind


def measure(bench: Array, device: Array, kind: FloatType, changed: Sequence[Array], unit: float, finite: Array) -> Measured:
    """Measure one tensor.

    Args:
        bench, device: values of one shape, real or complex; blocks of them are taken to float64 (complex128).
        kind: type of the device's tensor.
        changed: results of the bench on changed inputs, of the same shape; may be empty.
        unit: relative size of these changes.
        finite: elements to be looked at, bool.
    """
    bench_values, device_values, looked, others = (
        bench.reshape(-1),
        device.reshape(-1),
        finite.reshape(-1),
        [c.reshape(-1) for c in changed],
    )
    count = int(np.count_nonzero(looked))
    if not count:
        return Measured()
    wide = np.complex128 if np.iscomplexobj(bench) else np.float64
    with np.errstate(all="ignore"):
        all_of_them = _rms(bench_values, looked, count)
        parts = []
        for start in range(0, bench_values.size, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            bench_block, device_block = (values[part].astype(wide, copy=False) for values in (bench_values, device_values))
            parts.append(
                _part(bench_block, device_block, kind, [c[part].astype(wide, copy=False) for c in others], unit, looked[part], all_of_them)
            )
        worst = max(range(len(parts)), key=lambda n: parts[n].units)
        # So many units have `MOST` of the elements at most; those of which nothing is kept have none
        singles = np.concatenate([part.singles for part in parts])
        at = int(MOST * (count - 1)) - (count - singles.size)
        most = float(np.partition(singles, at)[at]) if at >= 0 else 0.0
        signed = np.sum([part.signed for part in parts], axis=0)
        typical = math.sqrt(sum(part.squares for part in parts) / count)
        biases = _biases(signed) if signed[0] >= BIASED else (0.0, 0.0, 0.0)
    return Measured(parts[worst].units, typical, most, *biases, worst * AT_ONCE + parts[worst].at, parts[worst].error)


def _biases(signed: Array) -> tuple[float, float, float]:
    """`Measured.mean`, `bias` and `drift` from the sums of `_Part.signed`."""
    total, rounding, inputs, roundings, moves = (float(value) for value in signed[1:6])
    shift = float(np.abs(signed[6:]).max(initial=0.0))
    random = SPREAD * math.sqrt(roundings)
    own = min(BIAS * rounding, CONSTANT * rounding + random + SHIFT * shift)
    random = math.hypot(random, SPREAD * math.sqrt(moves)) + ALIKE * max(inputs - rounding, 0.0)
    with_inputs = min(BIAS * (rounding + inputs), CONSTANTS * rounding + random + SHIFT * shift)
    return total / rounding, total / own, total / with_inputs


@dataclass(frozen=True, slots=True)
class _Part:
    """What `measure` knows of some elements.

    Attributes:
        units, at, error: of `Measured`, the place within them.
        squares: sum of the squares of all units.
        singles: units of each without excuses, those that are not 0.
        signed: number of elements that are not zero, sum of their signed errors, of what rounding the output, and the inputs, can make,
            the sums of the variances of these two, and for each of the changes the sum of what it moves, outwards positive.
    """

    units: float
    at: int
    error: float
    squares: float
    singles: Array
    signed: Array


def _part(bench: Array, device: Array, kind: FloatType, changed: list[Array], unit: float, looked: Array, all_of_them: float) -> _Part:
    size = np.where(looked, np.abs(bench), 0.0)
    error = np.where(looked, np.abs(device - bench), 0.0)
    moved, error = _measure_changes(bench, device, size, error, changed, looked, unit, kind)
    if not changed:
        moved = UNMEASURED * unit * np.maximum(size, all_of_them)
    inner = internal(kind).round_off
    floor = kind.smallest + np.where(size < kind.normal, kind.normal if kind.least < -100 else 0.0, 0.0)
    excess = np.maximum(error - kind.round_off * size - floor, 0.0)
    scale = inner * np.maximum(size, kind.normal) + moved * (inner / unit)  # below the smallest normal number a unit is always as large
    single = np.where(excess > 0, excess / scale, 0.0)
    scale = np.maximum(scale, SHARE * _largest_around(scale))
    units = np.where(excess > 0, excess / np.maximum(scale, OF_ALL * inner * all_of_them), 0.0)
    units = np.where(np.isnan(units), np.inf, units)  # beyond the range of float64
    position = int(np.argmax(units))
    signed = np.zeros(6 + len(changed))
    if internal(kind) is not kind and not np.iscomplexobj(bench):
        used = looked & (size >= kind.normal)
        difference = np.where(used, (device - bench) * np.sign(bench), 0.0)
        by_output, by_inputs = kind.round_off * size[used], (kind.round_off / unit) * moved[used]
        signed[:4] = used.sum(), difference.sum(), by_output.sum(), by_inputs.sum()
        signed[4:6] = np.square(by_output).sum() / 3, np.square(by_inputs).sum() / 3
        for n, other in enumerate(changed):
            shift = np.where(used & np.isfinite(other), (other - bench) * np.sign(bench), 0.0)
            signed[6 + n] = shift.sum() * (kind.round_off / unit)
    single = single[looked & (single != 0)].astype(np.float32)
    return _Part(float(units[position]), position, float(error[position]), float(np.square(units).sum()), single, signed)


def _measure_changes(
    bench: Array, device: Array, size: Array, error: Array, changed: list[Array], looked: Array, unit: float, kind: FloatType
) -> tuple[Array, Array]:
    """How far the changes move every element, and the error, where the operator jumps that against the nearest result."""
    moved = np.zeros(bench.shape)
    for other in changed:
        usable = looked & np.isfinite(other)
        step = np.where(usable, np.abs(other - bench), 0.0)
        jumps = usable & (step > JUMP * unit * np.maximum(size, np.abs(other)))
        if jumps.any():
            error = np.where(jumps, np.minimum(error, np.maximum(np.abs(device - other) - kind.round_off * np.abs(other), 0.0)), error)
        moved = np.maximum(moved, step)
    return moved, error


def _rms(values: Array, looked: Array, count: int) -> float:
    """Root mean square of the `count` elements that are looked at, without overflow."""

    def sizes() -> Iterator[Array]:
        for start in range(0, values.size, AT_ONCE):
            part = np.abs(values[start : start + AT_ONCE])
            yield part if count == values.size else part[looked[start : start + AT_ONCE]]

    top = float(max(part.max(initial=0.0) for part in sizes()))
    if not top or not math.isfinite(top):
        return top
    return top * math.sqrt(sum(float(np.square(part / top).sum()) for part in sizes()) / count)


def _largest_around(values: Array) -> Array:
    """Largest of the elements up to `NEIGHBOURS` to each side."""
    best: Array = values.copy()
    for shift in range(1, min(NEIGHBOURS, values.size - 1) + 1):
        np.maximum(best[shift:], values[:-shift], out=best[shift:])
        np.maximum(best[:-shift], values[shift:], out=best[:-shift])
    return best
