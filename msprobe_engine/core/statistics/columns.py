"""Whole columns of statistics rows: one numpy array per statistic instead of one `Statistics` object per tensor.

The values are those of `msprobe_engine.core.statistics.rows.read_row`, with NaN where it gives None.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.statistics.rows import (
    BELOW,
    COUNT,
    DIGEST,
    FLAGS,
    HAS_BELOW,
    HAS_DIGEST,
    HAS_EPS,
    HAS_INTEGERS,
    IMAX,
    IMIN,
    MAX,
    MIN,
    NANS,
    NEG_INF,
    NO_SUMS,
    POS_INF,
    REDACTED,
    SUM,
    SUMSQ,
    ZEROS,
    Rows,
    as_int64,
    kurtosis,
    nonfinite,
)

Column = npt.NDArray[np.float64]

OPS = ("norm", "min", "max", "mean", "zeros", "nans", "infs", "rms", "absmax", "kurtosis", "underflow")
"""Statistics that are numbers. `digest` is text, `shape` and `dtype` are known without a row."""


def column(rows: Rows, op: str) -> Column:
    """One statistic of every row, NaN-propagating, [n] float64.

    `zeros` is the share of exact zeros (0 to 1), as the monitor's files have it, or of elements below the limit when the row was
    taken with one that says what counts as zero (HAS_EPS); `nans` and `infs` are counts; `rms` is norm / sqrt(count); `absmax` is
    the largest absolute value; `kurtosis` is `msprobe_engine.core.statistics.rows.kurtosis`, NaN when there is NaN or Inf; `underflow` is
    the share of elements that are not zero and below the limit of the row. NaN where a row has no elements (counts are 0 there), or was
    taken without the words that the statistic needs, or does not tell it (`msprobe_engine.core.redaction`).

    Raises:
        KeyError: `op` is none of `OPS`.
    """
    values = _COLUMNS[op](rows)
    flags = as_int64(rows)[:, FLAGS]
    if op not in ("nans", "infs") and (hidden := (flags & (NO_SUMS if op in _OF_SUMS else REDACTED)) != 0).any():
        values[hidden] = np.nan
    return values


def absmax(rows: Rows) -> Column:
    """Largest absolute finite value of every row, 0 where there is none, [n] float64."""
    return np.maximum(np.maximum(rows[:, MAX], -rows[:, MIN]), 0.0)


def exact_integers(rows: Rows) -> npt.NDArray[np.bool_]:
    """True for rows whose smallest and largest value are exact in the words IMIN and IMAX, [n]."""
    ints = as_int64(rows)
    exact: npt.NDArray[np.bool_] = ((ints[:, FLAGS] & HAS_INTEGERS) != 0) & (ints[:, COUNT] > 0)
    return exact


def integer_bounds(rows: Rows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Exact smallest and largest values, meaningful where `exact_integers` is True."""
    ints = as_int64(rows)
    return ints[:, IMIN], ints[:, IMAX]


def digests(rows: Rows) -> list[str]:
    """The 64-bit digest of every row as 16 hexadecimal digits, empty where none was taken."""
    ints = as_int64(rows)
    words = ints[:, DIGEST].astype(np.uint64).tolist()
    return [f"{word:016x}" if flags & HAS_DIGEST else "" for word, flags in zip(words, ints[:, FLAGS].tolist())]


def _norm(rows: Rows) -> Column:
    out = np.sqrt(rows[:, SUMSQ])
    return _spoil(rows, out, np.inf)


def _rms(rows: Rows) -> Column:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(_norm(rows) / np.sqrt(as_int64(rows)[:, COUNT]))


def _mean(rows: Rows) -> Column:
    ints = as_int64(rows)
    finite = ints[:, COUNT] - nonfinite(rows)
    with np.errstate(invalid="ignore", divide="ignore"):
        out: Column = rows[:, SUM] / finite
    plus, minus = ints[:, POS_INF] > 0, ints[:, NEG_INF] > 0
    out[plus] = np.inf
    out[minus] = -np.inf
    out[(plus & minus) | (ints[:, NANS] > 0) | (ints[:, COUNT] == 0)] = np.nan
    return out


def _max(rows: Rows) -> Column:
    # A row without finite values holds -Inf here, which is also the maximum of a tensor of -Inf.
    out = rows[:, MAX].copy()
    out[as_int64(rows)[:, POS_INF] > 0] = np.inf
    return _spoil(rows, out, None)


def _min(rows: Rows) -> Column:
    out = rows[:, MIN].copy()
    out[as_int64(rows)[:, NEG_INF] > 0] = -np.inf
    return _spoil(rows, out, None)


def _spoil(rows: Rows, out: Column, inf: float | None) -> Column:
    ints = as_int64(rows)
    if inf is not None:
        out[(ints[:, POS_INF] > 0) | (ints[:, NEG_INF] > 0)] = inf
    out[(ints[:, NANS] > 0) | (ints[:, COUNT] == 0)] = np.nan
    return out


def _zeros(rows: Rows) -> Column:
    ints = as_int64(rows)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(ints[:, FLAGS] & HAS_EPS, ints[:, BELOW], ints[:, ZEROS]) / ints[:, COUNT])


def _underflow(rows: Rows) -> Column:
    ints = as_int64(rows)
    with np.errstate(invalid="ignore", divide="ignore"):
        out: Column = (ints[:, BELOW] - ints[:, ZEROS]) / ints[:, COUNT]
    out[(ints[:, FLAGS] & (HAS_BELOW | HAS_EPS)) != HAS_BELOW] = np.nan
    return out


def _absmax(rows: Rows) -> Column:
    return _spoil(rows, absmax(rows), np.inf)


def _kurtosis(rows: Rows) -> Column:
    return np.where(nonfinite(rows) > 0, np.nan, kurtosis(rows))


def _nans(rows: Rows) -> Column:
    return as_int64(rows)[:, NANS].astype(np.float64)


def _infs(rows: Rows) -> Column:
    ints = as_int64(rows)
    return (ints[:, POS_INF] + ints[:, NEG_INF]).astype(np.float64)


_OF_SUMS = ("norm", "mean", "rms")
_COLUMNS = {
    "norm": _norm, "min": _min, "max": _max, "mean": _mean, "zeros": _zeros, "nans": _nans, "infs": _infs, "rms": _rms,
    "absmax": _absmax, "kurtosis": _kurtosis, "underflow": _underflow,
}  # fmt: skip
