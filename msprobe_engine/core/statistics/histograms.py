"""Histograms that travel as statistics rows: they arrive with the rows of their step and merge as these do.

A histogram of n bins takes `row_count` consecutive rows. Each holds five counts in its words 1 to 5, the number of elements of the
tensor in COUNT, and otherwise what an empty tensor has; unused words of the last row are 0. A sample refers to its histogram by
`reference` in ``extra["histogram"]``.

===========  ====  ==================================================================================================
kind         bins  what is counted where
===========  ====  ==================================================================================================
``linear``   30    bin k has the values x with k - 15 <= 15 x < k - 14 (15 x in float64), 1.0 is in the last; values outside
                   of -1 to 1, NaN and Inf are not counted
``log2``     50    by the exponent of the absolute value: bin k has 2**(k - 40) <= \\|x\\| < 2**(k - 39); the first one also
                   everything smaller, the last one everything larger; zeros, NaN and Inf are not counted
===========  ====  ==================================================================================================

Complex tensors are counted by their absolute value, integers as float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows

BINS: dict[str, int] = {"linear": 30, "log2": 50}
"""Kinds and their numbers of bins."""
PER_ROW = 5
LOWEST = -40
"""Exponent of the first bin of ``log2``."""

Counts = npt.NDArray[np.int64]
_COUNTERS = 64  # of the kernel; the last one is for what has no bin


def bins(kind: str) -> int:
    """Number of bins of `kind`.

    Raises:
        UsageError: no such kind.
    """
    if kind not in BINS:
        raise UsageError(f"histogram kind is {kind!r}; allowed: {', '.join(BINS)}")
    return BINS[kind]


def row_count(kind: str) -> int:
    """Number of rows that a histogram takes."""
    return -(-bins(kind) // PER_ROW)


def edges(kind: str) -> npt.NDArray[np.float64]:
    """Limits of the bins, [bins + 1], ascending. Those of ``log2`` are absolute values; what lies outside of the first and the last
    one is in the first and the last bin."""
    n = bins(kind)
    if kind == "linear":
        return np.arange(-15.0, 16.0) / 15.0
    return np.exp2(np.arange(LOWEST, LOWEST + n + 1, dtype=np.float64))


def reference(first: int, kind: str) -> dict[str, Any]:
    """What ``extra["histogram"]`` of a sample holds: ``row`` (the first one), ``kind`` and ``bins``."""
    return {"row": first, "kind": kind, "bins": bins(kind)}


def counts(rows: Rows, first: int, kind: str) -> Counts:
    """The counts of a histogram, [bins] int64.

    Args:
        rows: [n, 16] of the step.
        first: its first row.
    """
    words: Counts = _rows.as_int64(rows)[first : first + row_count(kind), 1 : 1 + PER_ROW]
    return words.flatten()[: bins(kind)]


def to_rows(found: Counts, numel: int) -> Rows:
    """The rows of a histogram with the counts `found` of a tensor of `numel` elements."""
    out = _rows.empty(-(-found.size // PER_ROW))
    ints = _rows.as_int64(out)
    ints[:, _rows.COUNT] = numel
    ints[:, _rows.FLAGS] = _rows.WRITTEN
    padded = np.zeros(len(out) * PER_ROW, np.int64)
    padded[: found.size] = found
    ints[:, 1 : 1 + PER_ROW] = padded.reshape(-1, PER_ROW)
    return out


def count(ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], code: int, kind: str) -> Counts:
    """Histogram of host memory: the C kernel, or numpy with the same result.

    Args:
        ptr, shape, strides: as of `host_kernel.reduce_strided`; strides in elements.
        code: element type, a value of `host_kernel.CODES`.

    Returns:
        [bins] int64.
    """
    n = bins(kind)
    if (kernel := host_kernel.kernel()) is not None:
        out = np.zeros(_COUNTERS, np.int64)
        kernel.histogram(ptr, shape, strides, code, list(BINS).index(kind), out.ctypes.data)
        return out[:n]
    return count_values(host_kernel.real_values(host_kernel.bytes_at(ptr, shape, strides, code), code), kind)


def count_values(values: npt.NDArray[Any], kind: str) -> Counts:
    """The definition, in numpy: histogram of an array of real numbers of any type."""
    n, real = bins(kind), values.astype(np.float64).reshape(-1)
    if kind == "linear":
        real = real[np.abs(real) <= 1.0]
        place = np.minimum(np.floor(real * 15.0) + 15.0, n - 1)
    else:
        real = real[np.isfinite(real) & (real != 0)]
        place = np.clip(np.frexp(real)[1] - 1 - LOWEST, 0, n - 1)
    return np.bincount(place.astype(np.int64), minlength=n)
