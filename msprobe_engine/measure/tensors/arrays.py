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


def difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Difference:
    """Compare two arrays of numbers (bool, integers, floats, complex). Errors are computed in float64.

    Where the shapes differ, the part that both have is compared: the leading elements of every dimension, of the flat arrays when
    the number of dimensions differs.
    """
    a, b = _common(a, b)
    if not a.size:
        return Difference(None, None, None, None, None, None)
    same = thousandth = hundredth = 0
    first: int | None = None
    absolute = relative = 0.0
    for start in range(0, a.size, _CHUNK):
        x, y = a[start : start + _CHUNK], b[start : start + _CHUNK]
        equal = (x == y) | ((x != x) & (y != y))
        same += int(equal.sum())
        if first is None and not equal.all():
            first = start + int(np.argmin(equal))
        error, scale = _errors(x, y, equal)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(equal, 0.0, np.where(np.isfinite(error), error / scale, np.inf))
        absolute, relative = max(absolute, float(error.max())), max(relative, float(ratio.max()))
        thousandth += int((ratio <= 1e-3).sum())
        hundredth += int((ratio <= 1e-2).sum())
    same_share, thousandth_share, hundredth_share = (100.0 * n / a.size for n in (same, thousandth, hundredth))
    return Difference(same_share, first, absolute, relative, thousandth_share, hundredth_share)


def beyond(a: npt.NDArray[Any], b: npt.NDArray[Any], rtol: float, atol: float) -> int:
    """How many elements of the part that `difference` compares are further apart than ``atol + rtol * max(|a|, |b|)``."""
    a, b = _common(a, b)
    found = 0
    for start in range(0, a.size, _CHUNK):
        x, y = a[start : start + _CHUNK], b[start : start + _CHUNK]
        equal = (x == y) | ((x != x) & (y != y))
        error, scale = _errors(x, y, equal)
        with np.errstate(invalid="ignore"):
            found += int(((error > atol + rtol * np.where(np.isfinite(scale), scale, 0.0)) & ~equal).sum())
    return found


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The part that both have, flat."""
    if a.ndim != b.ndim:
        a, b = a.reshape(-1), b.reshape(-1)
    if a.shape != b.shape:
        common = tuple(slice(0, min(n, m)) for n, m in zip(a.shape, b.shape))
        a, b = a[common], b[common]
    return a.reshape(-1), b.reshape(-1)


def _errors(x: npt.NDArray[Any], y: npt.NDArray[Any], equal: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Absolute error and larger magnitude per element, float64; what is not finite on one side only is an infinite error."""
    wide: Any = np.complex128 if np.iscomplexobj(x) or np.iscomplexobj(y) else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(x.astype(wide) - y.astype(wide))
        scale = np.maximum(np.abs(x.astype(wide)), np.abs(y.astype(wide)))
    if x.dtype.kind in "iu" and y.dtype.kind in "iu" and not equal.all():
        # float64 rounds integers above 2**53: unequal ones must not have the error 0
        error = np.where(equal, 0.0, np.maximum(error, 1.0))
    return np.where(equal, 0.0, np.where(np.isnan(error), np.inf, error)), scale
