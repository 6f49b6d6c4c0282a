"""The statistics row of a tensor on an accelerator: one pass over the data by a Triton kernel, no wait, no copy.

`device_launch` starts `_row_kernel` on up to `MAX_PROGRAMS` programs. Each walks over tiles of 1024 32-bit words and ends with one row in
the layout of `msprobe_engine.rows`; when there is more than one, `_merge_kernel` merges them. Small tensors are one launch, all
others two. No atomic operations: the same bits give the same row in every run.

* Data are loaded as unsigned bits and decoded here, so every GPU reads every type, also the 8-bit floats it has no instructions for.
* Sums: each element is converted to float64 and its powers are added in float64, per lane, then as a tree. Relative error of SUMSQ
  and SUM4, and error of SUM and SUM3 relative to the sum of absolute values: below (elements / lanes + 30) * 2**-53, about 1e-12 for
  a billion elements.
* Offsets are 64 bits. COUNT and FLAGS are left to the host, which knows them; for uint64 FLAGS says (HAS_INTEGERS) that the values do
  not fit int64.
* A tensor that is not contiguous is copied on the device first, unless it is a permutation of dense memory and no digest is asked
  for: then its memory is read as it lies, the statistics do not depend on the order.

Importing this module imports Triton; `msprobe_integrations.torch.statistics` does so at the first tensor on an accelerator. With
``TRITON_INTERPRET=1`` set before the import the kernels run on CPU tensors in Triton's interpreter: that is how the tests run them.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# Triton has no types, and its kernels take none.

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from msprobe_engine import hostkernel
from msprobe_engine import rows as _rows
from msprobe_integrations.torch.device_bits import unsigned, values

TILE_WORDS = 1024
"""32-bit words per tile: one block of the digest, so that a lane has the same word weight in every tile."""
TILES_PER_PROGRAM = 8
MAX_PROGRAMS = 1024
STAGES = 4
"""Tiles that are loaded ahead."""

ROW_BYTES = 8 * _rows.WORDS
KINDS: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in hostkernel.NAMES if hasattr(torch, name) and not name.startswith("complex")
}
"""Types the kernel reads, and their names in it."""

WORDS_WANTED = hostkernel.WANT_DIGEST | hostkernel.WANT_MOMENTS | hostkernel.WANT_BELOW
"""What a caller may want of a row that changes the kernel."""
_T = tl.constexpr(TILE_WORDS)
_W = tl.constexpr(_rows.WORDS)
_PARTS = tl.constexpr(MAX_PROGRAMS)
_MOST = tl.constexpr(2**63 - 1)
_LEAST = tl.constexpr(-(2**63))
_XOR = tl.constexpr(0x9E3779B9)
_SEED = tl.constexpr(0x6D7370726F626500)
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _splitmix64(x):
    """Of `msprobe_engine.digest`; uint64 in and out."""
    z = x + _GAMMA
    z = (z ^ (z >> 30)) * _MIX1
    z = (z ^ (z >> 27)) * _MIX2
    return z ^ (z >> 31)


@triton.jit
def _store(row, nans, pos, neg, zeros, digest, low, high, total, squares, imin, imax, flags):
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
    bits,
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
    KIND: tl.constexpr,
    INTEGER: tl.constexpr,
    MOMENTS: tl.constexpr,
    BELOW: tl.constexpr,
):
    """Lane-wise sums and extremes with one more tile."""
    value = values(bits, KIND)
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


@triton.jit(do_not_specialize=["n", "index0", "limit"])
def _row_kernel(
    data,
    out,
    n: tl.int64,
    index0: tl.int64,
    limit: tl.int64,
    KIND: tl.constexpr,
    INTEGER: tl.constexpr,
    SIZE: tl.constexpr,
    DIGEST: tl.constexpr,
    MOMENTS: tl.constexpr,
    BELOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Row number p of `out` ([programs, 16] int64): the tiles p, p + programs, ... of the `n` elements whose bits are at `data`.
    `limit`: the bits of the float64 that BELOW compares with."""
    PER: tl.constexpr = 2 if SIZE == 8 else 1  # digest words per element
    TILE: tl.constexpr = _T // PER
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    none = tl.zeros([TILE], tl.int32)
    zeros, nans, pos, neg = none, none, none, none
    total = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    cubes = tl.zeros([TILE], tl.float64)
    fourths = tl.zeros([TILE], tl.float64)
    below = none
    bound = limit.to(tl.int64).to(tl.float64, bitcast=True)
    if KIND == "uint64":
        low = tl.full([TILE], 2**64 - 1, tl.uint64)
        high = tl.full([TILE], 0, tl.uint64)
    elif INTEGER:
        low = tl.full([TILE], _MOST, tl.int64)
        high = tl.full([TILE], _LEAST, tl.int64)
    elif KIND == "float64":
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
        bits = tl.load(data + (start + lane))
        zeros, nans, pos, neg, low, high, total, squares, cubes, fourths, below = _add(
            bits, every, zeros, nans, pos, neg, low, high, total, squares, cubes, fourths, below, bound, KIND, INTEGER, MOMENTS, BELOW
        )
        if DIGEST:
            digest = _add_digest(bits, every, digest, word0 + start * PER, place, weight, weight_up, SIZE)
    rest = whole + lane < tl.where(n // TILE % programs == program, n, whole)
    bits = tl.load(data + (whole + lane), mask=rest, other=0)
    zeros, nans, pos, neg, low, high, total, squares, cubes, fourths, below = _add(
        bits, rest, zeros, nans, pos, neg, low, high, total, squares, cubes, fourths, below, bound, KIND, INTEGER, MOMENTS, BELOW
    )
    if DIGEST:
        digest = _add_digest(bits, rest, digest, word0 + whole * PER, place, weight, weight_up, SIZE)
    least = tl.min(low, 0)
    most = tl.max(high, 0)
    imin = tl.full([], _MOST, tl.int64)
    imax = tl.full([], _LEAST, tl.int64)
    flags = tl.full([], 0, tl.int64)
    if KIND == "uint64":
        over = most > _MOST
        imin = tl.where(over, imin, least.to(tl.int64, bitcast=True))
        imax = tl.where(over, imax, most.to(tl.int64, bitcast=True))
        flags = tl.where(over, 2, flags)
    elif INTEGER:
        imin = least
        imax = most
    _store(
        out + program * _W,
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
        tl.store(out + program * _W + 13, tl.sum(cubes, 0).to(tl.int64, bitcast=True))
        tl.store(out + program * _W + 14, tl.sum(fourths, 0).to(tl.int64, bitcast=True))
    if BELOW:
        tl.store(out + program * _W + 15, tl.sum(below.to(tl.int64), 0))


@triton.jit
def _word(parts, inside, WORD: tl.constexpr, neutral):
    """Word `WORD` of every row, `neutral` behind the end."""
    return tl.load(parts + tl.arange(0, _PARTS) * _W + WORD, mask=inside, other=neutral)


@triton.jit
def _real(parts, inside, WORD: tl.constexpr, neutral):
    """Word `WORD` of every row as float64, `neutral` behind the end."""
    return tl.where(inside, _word(parts, inside, WORD, 0).to(tl.float64, bitcast=True), neutral)


@triton.jit(do_not_specialize=["programs"])
def _merge_kernel(parts, out, programs: tl.int32, MOMENTS: tl.constexpr, BELOW: tl.constexpr):
    """`msprobe_engine.rows.merge` of the rows `parts` ([programs, 16] int64) into the row `out`."""
    inside = tl.arange(0, _PARTS) < programs
    flags = tl.max(_word(parts, inside, 12, 0), 0)
    _store(
        out,
        tl.sum(_word(parts, inside, 1, 0), 0),
        tl.sum(_word(parts, inside, 2, 0), 0),
        tl.sum(_word(parts, inside, 3, 0), 0),
        tl.sum(_word(parts, inside, 4, 0), 0),
        tl.sum(_word(parts, inside, 5, 0), 0),
        tl.min(_real(parts, inside, 6, float("inf")), 0),
        tl.max(_real(parts, inside, 7, float("-inf")), 0),
        tl.sum(_real(parts, inside, 8, 0.0), 0),
        tl.sum(_real(parts, inside, 9, 0.0), 0),
        tl.where(flags > 0, _MOST, tl.min(_word(parts, inside, 10, _MOST), 0)),
        tl.where(flags > 0, _LEAST, tl.max(_word(parts, inside, 11, _LEAST), 0)),
        flags,
    )
    if MOMENTS:
        tl.store(out + 13, tl.sum(_real(parts, inside, 13, 0.0), 0).to(tl.int64, bitcast=True))
        tl.store(out + 14, tl.sum(_real(parts, inside, 14, 0.0), 0).to(tl.int64, bitcast=True))
    if BELOW:
        tl.store(out + 15, tl.sum(_word(parts, inside, 15, 0), 0))


@lru_cache(None)
def constants(dtype: torch.dtype, want: int) -> dict[str, Any]:
    """Compile-time arguments of `_row_kernel`: one compilation per type and per set of words that are wanted. `want` may have no
    limit in it."""
    name = KINDS[dtype]
    integer = name.startswith(("int", "uint", "bool"))
    digest = bool(want & hostkernel.WANT_DIGEST)
    return {"KIND": name, "INTEGER": integer, "SIZE": dtype.itemsize, "DIGEST": digest, **more_words(want), "STAGES": STAGES}


@lru_cache(None)
def more_words(want: int) -> dict[str, bool]:
    """Compile-time arguments of `_merge_kernel`."""
    return {"MOMENTS": bool(want & hostkernel.WANT_MOMENTS), "BELOW": bool(want & hostkernel.WANT_BELOW)}


def elements_per_program(size: int) -> int:
    """How many elements of `size` bytes a program takes as long as there are fewer than `MAX_PROGRAMS`."""
    return (TILE_WORDS // 2 if size == 8 else TILE_WORDS) * TILES_PER_PROGRAM
