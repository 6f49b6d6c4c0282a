"""Histograms (`msprobe_engine.core.statistics.histograms`) of tensors on an accelerator by Triton kernels: two launches, no temporary but
the counts of the programs, no atomic operations on memory that programs share.

Importing this module imports Triton; see `device.kernel`.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# Triton has no types, and its kernels take none.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from msprobe_engine.core.statistics import histograms
from msprobe_integrations.torch.statistics.device import kernel as _kernel
from msprobe_integrations.torch.statistics.device.bits import values
from msprobe_integrations.torch.statistics.device.launch import BITS, DIMENSIONS, collapse, current
from msprobe_integrations.torch.statistics.device.tiles import TILE_WORDS, _offset

COUNTERS = 64
"""Per program; the last one is for what has no bin."""
_COUNTERS = tl.constexpr(COUNTERS)
_T = tl.constexpr(TILE_WORDS)
_AT_ONCE = tl.constexpr(16)
_PER_ROW = tl.constexpr(histograms.PER_ROW)
_LOWEST = tl.constexpr(histograms.LOWEST)


@triton.jit
def _bin(value, LINEAR: tl.constexpr, BINS: tl.constexpr):
    """Bin of every value, the last counter where it has none; int32."""
    if LINEAR:
        real = value.to(tl.float64)
        inside = (real >= -1.0) & (real <= 1.0)
        found = tl.floor(tl.where(inside, real, 0.0) * 15.0).to(tl.int32) + 15
    elif value.dtype == tl.float32:  # what is below float32's normal numbers is in the first bin
        inside = (tl.abs(value) < float("inf")) & (value != 0)
        found = ((value.to(tl.int32, bitcast=True) >> 23) & 0xFF) - (127 + _LOWEST)
    else:
        real = value.to(tl.float64)
        inside = (tl.abs(real) < float("inf")) & (real != 0)
        found = ((real.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - (1023 + _LOWEST)
    return tl.where(inside, tl.minimum(tl.maximum(found, 0), BINS - 1), _COUNTERS - 1)


@triton.jit(do_not_specialize=["n", "s1", "s2", "s3", "t0", "t1", "t2", "t3"])
def _count_kernel(
    data,
    parts,
    n: tl.int64,
    s1: tl.int64,
    s2: tl.int64,
    s3: tl.int64,
    t0: tl.int64,
    t1: tl.int64,
    t2: tl.int64,
    t3: tl.int64,
    KIND: tl.constexpr,
    LINEAR: tl.constexpr,
    BINS: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Counters number p of `parts` ([programs, 64] int64): a part of the `n` elements whose bits lie at `data`, or with DIMS where
    `device.tiles._offset` says."""
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, _T)
    total = tl.zeros([_COUNTERS], tl.int64)
    for start in range(program * _T, n, tl.num_programs(0).to(tl.int64) * _T):
        index = start + lane
        inside = index < n
        if DIMS:
            bits = tl.load(data + _offset(index, s1, s2, s3, t0, t1, t2, t3, DIMS, WIDE), mask=inside, other=0)
        else:
            bits = tl.load(data + index, mask=inside, other=0)
        found = tl.where(inside, _bin(values(bits, KIND), LINEAR, BINS), _COUNTERS - 1)
        total += tl.histogram(found, _COUNTERS).to(tl.int64)
    tl.store(parts + program * _COUNTERS + tl.arange(0, _COUNTERS), total)


@triton.jit
def _put(out, total, FIRST: tl.constexpr):
    """Counters FIRST to FIRST + 4 as a row; its extremes are those of no elements."""
    place = tl.arange(0, _COUNTERS)
    tl.store(out + 1 + place - FIRST, total, mask=(place >= FIRST) & (place < FIRST + _PER_ROW))
    edge = tl.full([], float("inf"), tl.float64)
    tl.store(out + 6, edge.to(tl.int64, bitcast=True))
    tl.store(out + 7, (-edge).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["programs"])
def _sum_kernel(parts, programs: tl.int32, o0, o1, o2, o3, o4, o5, o6, o7, o8, o9, ROWS: tl.constexpr):
    """Add the counters of all programs and write them to the rows o0, o1, ..."""
    total = tl.zeros([_COUNTERS], tl.int64)
    for first in range(0, programs, _AT_ONCE):
        line = first + tl.arange(0, _AT_ONCE)
        place = line.to(tl.int64)[:, None] * _COUNTERS + tl.arange(0, _COUNTERS)[None, :]
        total += tl.sum(tl.load(parts + place, mask=line[:, None] < programs, other=0), 0)
    _put(o0, total, 0)
    _put(o1, total, 5)
    _put(o2, total, 10)
    _put(o3, total, 15)
    _put(o4, total, 20)
    _put(o5, total, 25)
    if ROWS > 6:
        _put(o6, total, 30)
        _put(o7, total, 35)
        _put(o8, total, 40)
        _put(o9, total, 45)


def constants(dtype: torch.dtype, kind: str) -> dict[str, Any]:
    """Compile-time arguments of `_count_kernel`, without those of its strides."""
    return {"KIND": _kernel.KINDS[dtype], "LINEAR": kind == "linear", "BINS": histograms.bins(kind)}


def count(tensor: torch.Tensor, kind: str, rows: Sequence[torch.Tensor]) -> None:
    """Write the counts of a tensor to the words of `rows`, on the current stream of its device.

    Args:
        tensor: plain, strided, of a type in `device.kernel.KINDS`, with at least one element; `device.launch.reads` it.
        kind: of `histograms.BINS`.
        rows: `histograms.row_count(kind)` rows ([16] float64) on its device.
    """
    data = tensor.detach()
    places = [] if torch.ops.aten.is_non_overlapping_and_dense.default(data) else collapse(data.shape, data.stride(), in_order=False)
    n = data.numel()
    padded = [(1, 0)] * (DIMENSIONS - len(places)) + places
    programs = min(_kernel.MAX_PROGRAMS, -(-n // (TILE_WORDS * _kernel.TILES_PER_PROGRAM)))
    out = [row.view(torch.int64) for row in rows]
    parts = out[0].new_empty(programs * COUNTERS)
    with current(data.device):
        _count_kernel[(programs,)](
            data.view(BITS[data.element_size()]), parts, n, *(size for size, _ in padded[1:]), *(stride for _, stride in padded),
            **constants(data.dtype, kind), DIMS=len(places), WIDE=n >= 2**31,
        )  # fmt: skip
        _sum_kernel[(1,)](parts, programs, *(out + out[:1] * (10 - len(out))), ROWS=len(out))
