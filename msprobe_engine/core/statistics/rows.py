"""The statistics row: sixteen 64-bit words per tensor, written by a device kernel, merged and read here.

A row lives in a float64 buffer of shape [capacity, 16]; the integer words are the same memory seen as int64.
Every word but CRC and XOR (which share their places with SUM3 and SUM4) merges over micro batches, shards and ranks without looking
at the data again (`merge`).

=====  ========  ==============================================================================
word   type      meaning
=====  ========  ==============================================================================
0      int64     COUNT    number of elements
1      int64     NANS     number of NaN
2      int64     POS_INF  number of +Inf
3      int64     NEG_INF  number of -Inf
4      int64     ZEROS    number of exact zeros (-0.0 too)
5      uint64    DIGEST   position-weighted digest, see `msprobe_engine.core.statistics.digest`; 0 when not asked for
6      float64   MIN      smallest finite value (+Inf when there is none)
7      float64   MAX      largest finite value (-Inf when there is none)
8      float64   SUM      sum of the finite values
9      float64   SUMSQ    sum of squares of the finite values
10     int64     IMIN     integer and bool tensors: exact smallest value (float64 MIN rounds above 2**53)
11     int64     IMAX     integer and bool tensors: exact largest value
12     int64     FLAGS    bit 0: DIGEST is valid, 1: IMIN/IMAX are valid, 2: the row was written, 3: CRC is valid, 4: XOR is valid,
                          5: SUM3 and SUM4 are valid, 6: BELOW is valid, 7: BELOW is what counts as zero (`monitor.eps`),
                          8: redacted, 9: SUM and SUMSQ are not known (`msprobe_engine.core.redaction`)
13     uint64    CRC      CRC-32 (zlib's) of the bytes of the elements in C order; 0 when not asked for
13     float64   SUM3     with bit 5: sum of the cubes of the finite values
14     uint64    XOR      XOR of the 64-bit little-endian words of these bytes, the last one filled up with zeros; 0 likewise
14     float64   SUM4     with bit 5: sum of the fourth powers of the finite values
15     int64     BELOW    number of elements whose absolute value is below a limit (strictly; zeros too, NaN never); 0 when not asked for
15     uint64    KEY_ID   with bit 8: which key the digest and the checksums were made with, 0: none
=====  ========  ==============================================================================

A row has checksums or moments, never both. A redacted row has no smallest and largest value and no zeros; it is written, never merged.

Precision of the kurtosis. The sums are raw (about zero), because only such sums merge without knowing each other's mean. The central
moments come out of them by cancellation, which costs digits when the mean is large against the spread: with q = |mean| / standard
deviation the relative error of the kurtosis is about 5e-15 * max(1, q)**4 (1e-6 at q = 100, 1e-2 at q = 1000). From q = 1000 on, so
also for constant tensors, `kurtosis` is NaN instead of noise. float64 values above 1e77 overflow the sum of fourth powers; then it
is NaN, too.

Complex tensors: MIN, MAX, the sums and BELOW are of the absolute value; NANS counts elements with a NaN part,
POS_INF elements with an infinite part (and no NaN part); ZEROS counts 0+0j.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import FLOATS, SMALL_FLOATS
from msprobe_engine.core.errors import UsageError

WORDS = 16
COUNT, NANS, POS_INF, NEG_INF, ZEROS, DIGEST = 0, 1, 2, 3, 4, 5
MIN, MAX, SUM, SUMSQ, IMIN, IMAX, FLAGS, CRC, XOR = 6, 7, 8, 9, 10, 11, 12, 13, 14
SUM3, SUM4, BELOW, KEY_ID = 13, 14, 15, 15
HAS_DIGEST, HAS_INTEGERS, WRITTEN, HAS_CRC, HAS_XOR, HAS_MOMENTS, HAS_BELOW, HAS_EPS = 1, 2, 4, 8, 16, 32, 64, 128
REDACTED, NO_SUMS = 256, 512

Rows = npt.NDArray[np.float64]

_LARGEST_Q = 1000.0


def underflow_limit(dtype: str) -> float:
    """The magnitude from which on a number of another type does not become zero in `dtype` (rounding to nearest, ties to even): just
    above half of the smallest number of `dtype`. A row whose BELOW was counted with this limit holds the number of elements that
    are zero, or would be.

    Raises:
        UsageError: `dtype` is none of `SMALL_FLOATS`.
    """
    if dtype not in SMALL_FLOATS:
        raise UsageError(f"underflow_dtype is {dtype!r}; allowed: {', '.join(SMALL_FLOATS)}")
    return math.nextafter(FLOATS[dtype].smallest / 2, math.inf)


def as_int64(rows: Rows) -> npt.NDArray[np.int64]:
    """The integer words of `rows` ([n, 16] float64): the same memory as int64."""
    return rows.view(np.int64)


def empty(n: int) -> Rows:
    """`n` rows of an empty tensor: the neutral element of `merge`."""
    rows = np.zeros((n, WORDS), np.float64)
    rows[:, MIN] = math.inf
    rows[:, MAX] = -math.inf
    ints = as_int64(rows)
    ints[:, IMIN] = np.iinfo(np.int64).max
    ints[:, IMAX] = np.iinfo(np.int64).min
    return rows


def is_written(row: npt.NDArray[np.float64]) -> bool:
    """Has somebody put numbers into this row ([16] float64)? What is in another one is not known."""
    return bool(int(row.view(np.int64)[FLAGS]) & WRITTEN)


def keep_nonfinite(rows: Rows) -> Rows:
    """Rows of what is certain of a whole tensor when these are those of a part of it: the NaN and Inf that were seen. A row without
    any becomes one that nothing is written into."""
    out, ints, seen = empty(len(rows)), as_int64(rows), [NANS, POS_INF, NEG_INF]
    as_int64(out)[:, seen] = ints[:, seen]
    as_int64(out)[:, COUNT] = ints[:, seen].sum(1)
    as_int64(out)[:, FLAGS] = np.where(as_int64(out)[:, COUNT] > 0, WRITTEN, 0)
    return out


def merge(a: Rows, b: Rows) -> Rows:
    """Row-wise union of two sets of elements: what one pass over both would have given (DIGEST mod 2**64). CRC and XOR depend on
    the order of the elements and on how many bytes they have, which a row does not know: the union has none, unless one side is
    empty.

    Args:
        a, b: [n, 16] float64 rows. The digests must have been taken with global positions.
    """
    out = np.empty_like(a)
    ia, ib, io = as_int64(a), as_int64(b), as_int64(out)
    for w in (COUNT, NANS, POS_INF, NEG_INF, ZEROS, DIGEST):
        io[:, w] = ia[:, w] + ib[:, w]
    out[:, MIN] = np.minimum(a[:, MIN], b[:, MIN])
    out[:, MAX] = np.maximum(a[:, MAX], b[:, MAX])
    out[:, SUM] = a[:, SUM] + b[:, SUM]
    out[:, SUMSQ] = a[:, SUMSQ] + b[:, SUMSQ]
    io[:, IMIN] = np.minimum(ia[:, IMIN], ib[:, IMIN])
    io[:, IMAX] = np.maximum(ia[:, IMAX], ib[:, IMAX])
    empty_a, empty_b = ia[:, COUNT] == 0, ib[:, COUNT] == 0
    both = ia[:, FLAGS] & ib[:, FLAGS] & ~(HAS_CRC | HAS_XOR)
    moments, below = (both & HAS_MOMENTS) != 0, (both & HAS_BELOW) != 0
    joint: dict[int, Any] = {FLAGS: both, BELOW: np.where(below, ia[:, BELOW] + ib[:, BELOW], 0)}
    for w in (SUM3, SUM4):  # what has no moments may have bits here that are no numbers
        joint[w] = (np.where(moments, a[:, w], 0.0) + np.where(moments, b[:, w], 0.0)).view(np.int64)
    for w, merged in joint.items():
        io[:, w] = np.where(empty_a, ib[:, w], np.where(empty_b, ia[:, w], merged))
    return out


def kurtosis(rows: Rows) -> npt.NDArray[np.float64]:
    """Fourth central moment of the finite elements over the square of the second (3 for normal data), [n] float64. NaN where the row
    has no moments or no spread that its sums can tell; see the head of this file."""
    ints = as_int64(rows)
    known = (ints[:, FLAGS] & HAS_MOMENTS) != 0
    with np.errstate(all="ignore"):
        finite = (ints[:, COUNT] - nonfinite(rows)).astype(np.float64)
        mean, second, third, fourth = (np.where(known, rows[:, w], np.nan) / finite for w in (SUM, SUMSQ, SUM3, SUM4))
        scale = np.sqrt(second)  # so that nothing below under- or overflows
        mean, third, fourth = mean / scale, third / scale**3, fourth / scale**4
        variance = 1.0 - mean * mean
        central = fourth - 4.0 * mean * third + 6.0 * mean**2 - 3.0 * mean**4
        out: npt.NDArray[np.float64] = central / (variance * variance)
        out[~np.isfinite(out) | (variance * _LARGEST_Q**2 <= mean * mean)] = np.nan
    return out


def nonfinite(rows: Rows) -> npt.NDArray[np.int64]:
    """NaN plus Inf elements per row, [n] int64."""
    ints = as_int64(rows)
    return ints[:, NANS] + ints[:, POS_INF] + ints[:, NEG_INF]


class Statistics(NamedTuple):
    """One row, readable. `max`, `min`, `mean`, `norm` propagate NaN and Inf as max(), min(), mean() and norm() of the
    tensor would; the `finite_*` fields leave NaN and Inf out. Fields are None where there is nothing to say (no elements,
    or no finite ones)."""

    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody needs here
    nans: int
    infs: int
    zeros: int
    max: float | int | None
    min: float | int | None
    mean: float | None
    norm: float | None
    finite_max: float | None
    finite_min: float | None
    finite_mean: float | None
    finite_norm: float | None
    digest: int | None
    crc32: int | None = None
    xor: int | None = None
    kurtosis: float | None = None
    below: int | None = None
    redacted: int | None = None
    """Values were left out; the number is that of the key of the digests, 0 without one."""

    @property
    def nonfinite(self) -> int:
        """Number of NaN and Inf elements."""
        return self.nans + self.infs

    @property
    def absmax(self) -> float | int | None:
        """Largest absolute value, NaN-propagating."""
        if self.max is None or self.min is None:
            return None
        return self.max if self.max != self.max or self.max >= -self.min else -self.min

    @property
    def rms(self) -> float | None:
        """Root mean square, NaN-propagating."""
        return None if self.norm is None else self.norm / math.sqrt(self.count)


def read_row(row: npt.NDArray[np.float64]) -> Statistics:
    """The statistics of one row ([16] float64)."""
    words = row.view(np.int64)
    count, nans, pos, neg = (int(words[w]) for w in (COUNT, NANS, POS_INF, NEG_INF))
    flags = int(words[FLAGS])
    digest = int(words[DIGEST]) & 0xFFFFFFFFFFFFFFFF if flags & HAS_DIGEST else None
    crc = int(words[CRC]) & 0xFFFFFFFF if flags & HAS_CRC else None
    xor = int(words[XOR]) & 0xFFFFFFFFFFFFFFFF if flags & HAS_XOR else None
    below = int(words[BELOW]) if flags & HAS_BELOW else None
    if flags & REDACTED:
        return _read_redacted(row, count, flags, (digest, crc, xor))
    if count == 0:
        return Statistics(0, 0, 0, 0, None, None, None, None, None, None, None, None, digest, crc, xor, None, below)
    zeros = int(words[ZEROS])
    finite = count - nans - pos - neg
    total, squares = float(row[SUM]), float(row[SUMSQ])
    fmax: float | int | None = float(row[MAX]) if finite else None
    fmin: float | int | None = float(row[MIN]) if finite else None
    if flags & HAS_INTEGERS:
        fmax, fmin = int(words[IMAX]), int(words[IMIN])
    fmean = total / finite if finite else None
    fnorm = math.sqrt(squares) if finite else None
    peak = None
    if flags & HAS_MOMENTS:
        peak = float(kurtosis(row.reshape(1, WORDS))[0]) if nans == pos == neg == 0 else math.nan
    rest = (fmax, fmin, fmean, fnorm, digest, crc, xor, peak, below)
    if nans:
        return Statistics(count, nans, pos + neg, zeros, math.nan, math.nan, math.nan, math.nan, *rest)
    if not pos and not neg:
        return Statistics(count, 0, 0, zeros, fmax, fmin, fmean, fnorm, *rest)
    top = math.inf if pos else fmax if fmax is not None else -math.inf
    bottom = -math.inf if neg else fmin if fmin is not None else math.inf
    mean = math.nan if pos and neg else math.inf if pos else -math.inf
    return Statistics(count, nans, pos + neg, zeros, top, bottom, mean, math.inf, *rest)


def _read_redacted(row: npt.NDArray[np.float64], count: int, flags: int, checksums: tuple[int | None, ...]) -> Statistics:
    mean = norm = None
    if count and not flags & NO_SUMS:
        mean, norm = float(row[SUM]) / count, math.sqrt(float(row[SUMSQ]))
    key_id = int(row.view(np.int64)[KEY_ID]) & 0xFFFFFFFFFFFFFFFF
    digest, crc, xor = checksums
    return Statistics(count, 0, 0, 0, None, None, mean, norm, None, None, mean, norm, digest, crc, xor, redacted=key_id)
