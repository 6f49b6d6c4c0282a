"""How the inputs of an operator are changed, as arithmetic on numpy arrays.

A tensor is an array of its own type; bfloat16, which numpy does not have, is a float32 array whose values are all bfloat16, with
``"bfloat16"`` as `dtype`. The numbers are those of the existing tool (version 8.1.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

IMPROVE, ADD_NOISE, BIT_NOISE, CHANGE_VALUE, NO_CHANGE = "improve_precision", "add_noise", "bit_noise", "change_value", "no_change"
TO_CPU = "to_cpu"
HIGHER = {"float16": "float32", "bfloat16": "float32"}
"""What improve_precision computes in."""

NOISE = {"bfloat16": 1e-4, "float16": 1e-6, "float32": 1e-8, "float64": 1e-16}
"""What add_noise adds, by type; types that are not here are not perturbed."""

_BITS = {"float16": np.uint16, "float32": np.uint32, "float64": np.uint64, "bfloat16": np.uint32}


class Unperturbed(Exception):
    """The input cannot be changed in this way; the text says why. No fault: the call is counted as skipped."""


def perturb(values: Array, dtype: str, mode: str) -> Array:
    """A changed copy of an input.

    Args:
        values: of a type in `NOISE`; any shape.
        mode: add_noise, bit_noise, change_value or no_change.

    Raises:
        Unperturbed: all its values are too small, or it has too few.
    """
    if mode == NO_CHANGE:
        return np.array(values)
    moved: Array = _CHANGES[mode](values, dtype)
    return moved


def _add_noise(values: Array, dtype: str) -> Array:
    """``x + n`` where abs(x) is above the square root of n."""
    noise = NOISE[dtype]
    _large_enough(values, noise)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = np.where(np.abs(values) > math.sqrt(noise), values + values.dtype.type(noise), values).astype(values.dtype)
    changed: Array = round_to_bfloat16(moved) if dtype == "bfloat16" else moved
    return changed


def _bit_noise(values: Array, dtype: str) -> Array:
    """The last bit of the fraction is turned where abs(x) is above the smallest normal number."""
    _large_enough(values, NOISE[dtype])
    kind = _BITS[dtype]
    last = kind(1 << 16) if dtype == "bfloat16" else kind(1)
    wanted = np.isfinite(values) & (np.abs(values) > np.finfo(values.dtype).tiny)
    bits = np.array(values, order="C").view(kind)  # ascontiguousarray makes one dimension of none
    turned: Array = np.where(wanted, bits ^ last, bits).view(values.dtype)
    return turned


def _change_value(values: Array, dtype: str) -> Array:  # noqa: ARG001
    """The first and the last element change places; of several dimensions x[0][0] and x[-1][-1]."""
    if values.ndim == 0 or values.size < 2:
        raise Unperturbed("has fewer than two elements")
    moved: Array = np.array(values)
    first, last = (0, -1) if values.ndim == 1 else ((0, 0), (-1, -1))
    moved[first], moved[last] = values[last], values[first]
    return moved


_CHANGES: dict[str, Callable[[Array, str], Array]] = {ADD_NOISE: _add_noise, BIT_NOISE: _bit_noise, CHANGE_VALUE: _change_value}


def _large_enough(values: Array, least: float) -> None:
    finite = values[np.isfinite(values)]
    if not finite.size or float(np.abs(finite).max()) < least:
        raise Unperturbed(f"has no value of at least {least:g}")


def round_to_bfloat16(values: Array) -> Array:
    """float32 rounded to bfloat16 (to nearest, ties to even), as float32. NaN stays."""
    bits = np.array(values, np.float32, order="C").view(np.uint32)
    moved = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    found: Array = np.where(np.isnan(values), values, moved.view(np.float32))
    return found
