"""How two arrays differ, element by element, in figures."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 20
"""Elements looked at together: what bounds the memory of a comparison of large files."""


class Difference(NamedTuple):
    """Figures of a comparison. NaN in both places is the same; an infinity against anything else is an infinite error. Without
    elements the figures are None.

    Attributes:
        same: share of equal elements, percent.
        first: index of the first unequal element in C order, None when there is none.
        absolute, relative: largest error; relative to the larger of the two magnitudes.
        within_thousandth, within_hundredth: share of elements with a relative error of at most 0.001 and 0.01, percent.
    """

    same: float | None
    first: int | None
    absolute: float | None
    relative: float | None
    within_thousandth: float | None
    within_hundredth: float | None


def difference(target: npt.NDArray[Any], golden: npt.NDArray[Any]) -> Difference:
    """Compare two arrays of numbers (bool, integers, floats, complex). Errors are computed in float64.

    Where the shapes differ, the part that both have is compared: the leading elements of every dimension, of the flat arrays when
    the number of dimensions differs.
    """
    target, golden = _common(target, golden)
    if not target.size:
        return Difference(None, None, None, None, None, None)
    same = thousandth = hundredth = 0
    first_unequal: int | None = None
    absolute = relative = 0.0
    for start in range(0, target.size, _CHUNK):
        target_chunk, golden_chunk = target[start : start + _CHUNK], golden[start : start + _CHUNK]
        equal = (target_chunk == golden_chunk) | ((target_chunk != target_chunk) & (golden_chunk != golden_chunk))
        same += int(equal.sum())
        if first_unequal is None and not equal.all():
            first_unequal = start + int(np.argmin(equal))
        error, scale = _errors(target_chunk, golden_chunk, equal)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(equal, 0.0, np.where(np.isfinite(error), error / scale, np.inf))
        absolute, relative = max(absolute, float(error.max())), max(relative, float(ratio.max()))
        thousandth += int((ratio <= 1e-3).sum())
        hundredth += int((ratio <= 1e-2).sum())
    same_share, thousandth_share, hundredth_share = (100.0 * n / target.size for n in (same, thousandth, hundredth))
    return Difference(same_share, first_unequal, absolute, relative, thousandth_share, hundredth_share)


def beyond(target: npt.NDArray[Any], golden: npt.NDArray[Any], rtol: float, atol: float) -> int:
    """How many elements of the part that `difference` compares are further apart than ``atol + rtol * max(|target|, |golden|)``."""
    target, golden = _common(target, golden)
    count = 0
    for start in range(0, target.size, _CHUNK):
        target_chunk, golden_chunk = target[start : start + _CHUNK], golden[start : start + _CHUNK]
        equal = (target_chunk == golden_chunk) | ((target_chunk != target_chunk) & (golden_chunk != golden_chunk))
        error, scale = _errors(target_chunk, golden_chunk, equal)
        with np.errstate(invalid="ignore"):
            count += int(((error > atol + rtol * np.where(np.isfinite(scale), scale, 0.0)) & ~equal).sum())
    return count


def _common(target: npt.NDArray[Any], golden: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The part that both have, flat."""
    if target.ndim != golden.ndim:
        target, golden = target.reshape(-1), golden.reshape(-1)
    if target.shape != golden.shape:
        common = tuple(slice(0, min(n, m)) for n, m in zip(target.shape, golden.shape))
        target, golden = target[common], golden[common]
    return target.reshape(-1), golden.reshape(-1)


def _errors(target: npt.NDArray[Any], golden: npt.NDArray[Any], equal: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Absolute error and larger magnitude per element, float64; what is not finite on one side only is an infinite error."""
    wide: Any = np.complex128 if np.iscomplexobj(target) or np.iscomplexobj(golden) else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(target.astype(wide) - golden.astype(wide))
        scale = np.maximum(np.abs(target.astype(wide)), np.abs(golden.astype(wide)))
    if target.dtype.kind in "iu" and golden.dtype.kind in "iu" and not equal.all():
        # float64 rounds integers above 2**53: unequal ones must not have the error 0
        error = np.where(equal, 0.0, np.maximum(error, 1.0))
    return np.where(equal, 0.0, np.where(np.isnan(error), np.inf, error)), scale
