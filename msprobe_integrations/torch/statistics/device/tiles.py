"""The statistics row of a range of elements by one program of a Triton kernel: what all kernels of `device.kernel` have in common.

Importing this module imports Triton; see `device.kernel`.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# Triton has no types, and its kernels take none.

from __future__ import annotations

import triton
import triton.language as tl

from msprobe_integrations.torch.statistics.device.bits import unsigned, values
from msprobe_integrations.torch.statistics.device.pairs import paired

TILE_WORDS = 1024
"""32-bit words per tile: one block of the digest, so that a lane has the same word weight in every tile."""
_T = tl.constexpr(TILE_WORDS)
MOST = tl.constexpr(2**63 - 1)
LEAST = tl.constexpr(-(2**63))
_XOR = tl.constexpr(0x9E3779B9)
_SEED = tl.constexpr(0x6D7370726F626500)
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _splitmix64(x):
    """Of `msprobe_engine.core.statistics.digest`; uint64 in and out."""
    z = x + _GAMMA
    z = (z ^ (z >> 30)) * _MIX1
    z = (z ^ (z >> 27)) * _MIX2
    return z ^ (z >> 31)


@triton.jit
def store(row, nans, pos, neg, zeros, digest, low, high, total, squares, imin, imax, flags):
    """Words 1 to 12 of a row at `row` (int64 pointer); `low` to `squares` are float64."""
    tl.store(row + 1, nans)
    tl.store(row + 2, pos)
    tl.store(row + 3, neg)
    tl.store(row + 4, zeros)
    tl.store(row + 5, digest)
    tl.store(row + 6, low.to(tl.int64, bitcast=True))
    tl.store(row + 7, high.to(tl.int64, bitcast=True))
    tl.store(row + 8, total.to(tl.int64, bitcast=True))
    tl.store(row + 9, squares.to(tl.int64, bitcast=True))
    tl.store(row + 10, imin)
    tl.store(row + 11, imax)
    tl.store(row + 12, flags)


@triton.jit
def _add(
    value,
    inside,
    zeros,
    nans,
    pos,
    neg,
    low,
    high,
    total,
    squares,
    cubes,
    fourths,
    below,
    limit,
    INTEGER: tl.constexpr,
    MOMENTS: tl.constexpr,
    BELOW: tl.constexpr,
):
    """Lane-wise sums and extremes with the values of one more tile."""
    zeros += (inside & (value == 0)).to(tl.int32)
    if INTEGER:
        counted = inside
    else:
        counted = inside & (tl.abs(value) < float("inf"))
        nans += (inside & (value != value)).to(tl.int32)
        pos += (inside & (value == float("inf"))).to(tl.int32)
        neg += (inside & (value == float("-inf"))).to(tl.int32)
    low = tl.minimum(low, tl.where(counted, value, low))
    high = tl.maximum(high, tl.where(counted, value, high))
    real = tl.where(counted, value, 0).to(tl.float64)
    square = real * real
    total += real
    squares += square
    if MOMENTS:
        cubes += square * real
        fourths += square * square
    if BELOW:
        below += (counted & (tl.abs(real) < limit)).to(tl.int32)
    return zeros, nans, pos, neg, low, high, total, squares, cubes, fourths, below


@triton.jit
def _add_digest(bits, inside, digest, word, place, weight, weight_up, SIZE: tl.constexpr):
    """Lane-wise digests with one more tile, whose first word has global number `word`."""
    block = (word // _T).to(tl.uint64)
    first = _splitmix64(block) | 1
    second = _splitmix64(block + 1) | 1
    wide = unsigned(bits, SIZE)
    part = ((wide & 0xFFFFFFFF) ^ _XOR) * weight * tl.where(place >= _T, second, first)
    if SIZE == 8:
        part += ((wide >> 32) ^ _XOR) * weight_up * tl.where(place + 1 >= _T, second, first)
    return digest + tl.where(inside, part, 0)


@triton.jit
def _offset(index, s1, s2, s3, t0, t1, t2, t3, DIMS: tl.constexpr, WIDE: tl.constexpr):
    """Where elements `index` (in C order) of a tensor of at most four dimensions lie; s: sizes of the last three, t: strides of all four,
    those of missing ones (they are the first) are not used. WIDE: there are 2**31 elements or more."""
    left = index
    if not WIDE:
        left = index.to(tl.int32)
    if DIMS == 1:
        offset = index * t3
    else:
        above = left // s3.to(left.dtype)
        offset = (left - above * s3.to(left.dtype)).to(tl.int64) * t3
        if DIMS > 2:
            left = above
            above = left // s2.to(left.dtype)
            offset += (left - above * s2.to(left.dtype)).to(tl.int64) * t2
            if DIMS > 3:
                left = above
                above = left // s1.to(left.dtype)
                offset += (left - above * s1.to(left.dtype)).to(tl.int64) * t1
                offset += above.to(tl.int64) * t0
            else:
                offset += above.to(tl.int64) * t1
        else:
            offset += above.to(tl.int64) * t2
    return offset


@triton.jit
def reduce(
    data,
    other,
    out,
    n,
    index0,
    limit,
    c0,
    c1,
    c2,
    program,
    programs,
    s1,
    s2,
    s3,
    t0,
    t1,
    t2,
    t3,
    KIND: tl.constexpr,
    INTEGER: tl.constexpr,
    SIZE: tl.constexpr,
    DIGEST: tl.constexpr,
    MOMENTS: tl.constexpr,
    BELOW: tl.constexpr,
    STAGES: tl.constexpr,
    KIND_B: tl.constexpr,
    OP: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the row `out` of the tiles program, program + programs, ... of `n` values: those of the bits at `data`, or with an OP of
    `msprobe_engine.core.statistics.pairs` (-1: none) those made of them and of the bits at `other`. DIMS: 0, or the arguments of `_offset`
    say where elements lie. `limit`: the bits of the float64 that BELOW compares with."""
    PER: tl.constexpr = 2 if SIZE == 8 else 1  # digest words per element
    TILE: tl.constexpr = _T // PER
    lane = tl.arange(0, TILE)
    none = tl.zeros([TILE], tl.int32)
    zeros, nans, pos, neg = none, none, none, none
    total = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    cubes = tl.zeros([TILE], tl.float64)
    fourths = tl.zeros([TILE], tl.float64)
    below = none
    bound = limit.to(tl.int64).to(tl.float64, bitcast=True)
    if INTEGER:
        if KIND == "uint64":
            low = tl.full([TILE], 2**64 - 1, tl.uint64)
            high = tl.full([TILE], 0, tl.uint64)
        else:
            low = tl.full([TILE], MOST, tl.int64)
            high = tl.full([TILE], LEAST, tl.int64)
    elif SIZE == 8:
        low = tl.full([TILE], float("inf"), tl.float64)
        high = tl.full([TILE], float("-inf"), tl.float64)
    else:
        low = tl.full([TILE], float("inf"), tl.float32)
        high = tl.full([TILE], float("-inf"), tl.float32)
    digest = tl.zeros([TILE], tl.uint64)
    word0 = index0 * PER
    place = (word0 % _T) + lane * PER  # of the lane's (first) word, from the start of the tile's first block: below two blocks
    weight = (_splitmix64((place % _T).to(tl.uint64) + _SEED) >> 32) | 1
    weight_up = (_splitmix64(((place + 1) % _T).to(tl.uint64) + _SEED) >> 32) | 1
    # Whole tiles have no mask: a mask that depends on `n` would keep the loads from being 16 bytes wide.
    whole = n // TILE * TILE
    every = tl.full([TILE], 1, tl.int1)
    for start in tl.range(program * TILE, whole, programs * TILE, num_stages=STAGES):
        index = start + lane
        if DIMS:
            bits = tl.load(data + _offset(index, s1, s2, s3, t0, t1, t2, t3, DIMS, WIDE))
        else:
            bits = tl.load(data + index)
        value = values(bits, KIND)
        if OP >= 0:
            value = paired(value, values(tl.load(other + index), KIND_B), c0, c1, c2, OP, SIZE == 8)
        zeros, nans, pos, neg, low, high, total, squares, cubes, fourths, below = _add(
            value, every, zeros, nans, pos, neg, low, high, total, squares, cubes, fourths, below, bound, INTEGER, MOMENTS, BELOW
        )
        if DIGEST:
            digest = _add_digest(bits, every, digest, word0 + start * PER, place, weight, weight_up, SIZE)
    index = whole + lane
    rest = index < tl.where(n // TILE % programs == program, n, whole)
    if DIMS:
        bits = tl.load(data + _offset(index, s1, s2, s3, t0, t1, t2, t3, DIMS, WIDE), mask=rest, other=0)
    else:
        bits = tl.load(data + index, mask=rest, other=0)
    value = values(bits, KIND)
    if OP >= 0:
        value = paired(value, values(tl.load(other + index, mask=rest, other=0), KIND_B), c0, c1, c2, OP, SIZE == 8)
    zeros, nans, pos, neg, low, high, total, squares, cubes, fourths, below = _add(
        value, rest, zeros, nans, pos, neg, low, high, total, squares, cubes, fourths, below, bound, INTEGER, MOMENTS, BELOW
    )
    if DIGEST:
        digest = _add_digest(bits, rest, digest, word0 + whole * PER, place, weight, weight_up, SIZE)
    least = tl.min(low, 0)
    most = tl.max(high, 0)
    imin = tl.full([], MOST, tl.int64)
    imax = tl.full([], LEAST, tl.int64)
    flags = tl.full([], 0, tl.int64)
    if KIND == "uint64":
        over = most > MOST
        imin = tl.where(over, imin, least.to(tl.int64, bitcast=True))
        imax = tl.where(over, imax, most.to(tl.int64, bitcast=True))
        flags = tl.where(over, 2, flags)
    elif INTEGER:
        imin = least
        imax = most
    store(
        out,
        tl.sum(nans.to(tl.int64), 0),
        tl.sum(pos.to(tl.int64), 0),
        tl.sum(neg.to(tl.int64), 0),
        tl.sum(zeros.to(tl.int64), 0),
        tl.sum(digest, 0).to(tl.int64, bitcast=True),
        least.to(tl.float64),
        most.to(tl.float64),
        tl.sum(total, 0),
        tl.sum(squares, 0),
        imin,
        imax,
        flags,
    )
    if MOMENTS:
        tl.store(out + 13, tl.sum(cubes, 0).to(tl.int64, bitcast=True))
        tl.store(out + 14, tl.sum(fourths, 0).to(tl.int64, bitcast=True))
    if BELOW:
        tl.store(out + 15, tl.sum(below.to(tl.int64), 0))
