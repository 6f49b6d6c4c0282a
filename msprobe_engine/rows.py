"""The statistics row: sixteen 64-bit words per tensor, written by a device kernel, merged and read here.

A row lives in a float64 buffer of shape [capacity, 16]; the integer words are the same memory seen as int64.
Every word but CRC and XOR merges over micro batches, shards and ranks without looking at the data again (`merge`).

=====  ========  ==============================================================================
word   type      meaning
=====  ========  ==============================================================================
0      int64     COUNT    number of elements
1      int64     NANS     number of NaN
2      int64     POS_INF  number of +Inf
3      int64     NEG_INF  number of -Inf
4      int64     ZEROS    number of exact zeros (-0.0 too)
5      uint64    DIGEST   position-weighted digest, see `msprobe_engine.digest`; 0 when not asked for
6      float64   MIN      smallest finite value (+Inf when there is none)
7      float64   MAX      largest finite value (-Inf when there is none)
8      float64   SUM      sum of the finite values
9      float64   SUMSQ    sum of squares of the finite values
10     int64     IMIN     integer and bool tensors: exact smallest value (float64 MIN rounds above 2**53)
11     int64     IMAX     integer and bool tensors: exact largest value
12     int64     FLAGS    bit 0: DIGEST is valid, 1: IMIN/IMAX are valid, 2: the row was written, 3: CRC is valid, 4: XOR is valid
13     uint64    CRC      CRC-32 (zlib's) of the bytes of the elements in C order; 0 when not asked for
14     uint64    XOR      XOR of the 64-bit little-endian words of these bytes, the last one filled up with zeros; 0 likewise
15     -         reserved, zero
=====  ========  ==============================================================================

Complex tensors: MIN, MAX, SUM and SUMSQ are of the absolute value; NANS counts elements with a NaN part,
POS_INF elements with an infinite part (and no NaN part); ZEROS counts 0+0j.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

WORDS = 16
COUNT, NANS, POS_INF, NEG_INF, ZEROS, DIGEST = 0, 1, 2, 3, 4, 5
MIN, MAX, SUM, SUMSQ, IMIN, IMAX, FLAGS, CRC, XOR = 6, 7, 8, 9, 10, 11, 12, 13, 14
HAS_DIGEST, HAS_INTEGERS, WRITTEN, HAS_CRC, HAS_XOR = 1, 2, 4, 8, 16

Rows = npt.NDArray[np.float64]


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
    for w, joint in ((FLAGS, both), (CRC, 0), (XOR, 0)):
        io[:, w] = np.where(empty_a, ib[:, w], np.where(empty_b, ia[:, w], joint))
    io[:, 15:] = 0
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

    @property
    def nonfinite(self) -> int:
        """Number of NaN and Inf elements."""
        return self.nans + self.infs

    @property
    def rms(self) -> float | None:
        """Root mean square, NaN-propagating."""
        return None if self.norm is None else self.norm / math.sqrt(self.count)


def read(row: npt.NDArray[np.float64]) -> Statistics:
    """The statistics of one row ([16] float64)."""
    words = row.view(np.int64)
    count, nans, pos, neg = (int(words[w]) for w in (COUNT, NANS, POS_INF, NEG_INF))
    flags = int(words[FLAGS])
    digest = int(words[DIGEST]) & 0xFFFFFFFFFFFFFFFF if flags & HAS_DIGEST else None
    crc = int(words[CRC]) & 0xFFFFFFFF if flags & HAS_CRC else None
    xor = int(words[XOR]) & 0xFFFFFFFFFFFFFFFF if flags & HAS_XOR else None
    if count == 0:
        return Statistics(0, 0, 0, 0, None, None, None, None, None, None, None, None, digest, crc, xor)
    zeros = int(words[ZEROS])
    finite = count - nans - pos - neg
    total, squares = float(row[SUM]), float(row[SUMSQ])
    fmax: float | int | None = float(row[MAX]) if finite else None
    fmin: float | int | None = float(row[MIN]) if finite else None
    if flags & HAS_INTEGERS:
        fmax, fmin = int(words[IMAX]), int(words[IMIN])
    fmean = total / finite if finite else None
    fnorm = math.sqrt(squares) if finite else None
    if nans:
        vmax = vmin = vmean = vnorm = math.nan
        return Statistics(count, nans, pos + neg, zeros, vmax, vmin, vmean, vnorm, fmax, fmin, fmean, fnorm, digest, crc, xor)
    if not pos and not neg:
        return Statistics(count, 0, 0, zeros, fmax, fmin, fmean, fnorm, fmax, fmin, fmean, fnorm, digest, crc, xor)
    top = math.inf if pos else fmax if fmax is not None else -math.inf
    bottom = -math.inf if neg else fmin if fmin is not None else math.inf
    mean = math.nan if pos and neg else math.inf if pos else -math.inf
    return Statistics(count, nans, pos + neg, zeros, top, bottom, mean, math.inf, fmax, fmin, fmean, fnorm, digest, crc, xor)
