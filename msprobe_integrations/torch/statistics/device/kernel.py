"""The statistics row of a tensor on an accelerator: one pass over the data by a Triton kernel, no wait, no copy.

`device.launch` starts `_row_kernel` on up to `MAX_PROGRAMS` programs. Each walks over tiles of 1024 32-bit words and ends with one row in
the layout of `msprobe_engine.core.statistics.rows`; when there is more than one, `_merge_kernel` merges them. Small tensors are one
launch, all others two. No atomic operations: the same bits give the same row in every run.

* Data are loaded as unsigned bits and decoded here, so every GPU reads every type, also the 8-bit floats it has no instructions for.
* Sums: each element is converted to float64 and its powers are added in float64, per lane, then as a tree. Relative error of SUMSQ
  and SUM4, and error of SUM and SUM3 relative to the sum of absolute values: below (elements / lanes + 30) * 2**-53, about 1e-12 for
  a billion elements.
* Offsets are 64 bits. COUNT and FLAGS are left to the host, which knows them; for uint64 FLAGS says (HAS_INTEGERS) that the values do
  not fit int64.
* A tensor that is not contiguous is read where it lies: a permutation of dense memory of which no digest is asked for as if it were
  contiguous (the statistics do not depend on the order), any other of up to four dimensions by `_strided_kernel`. Neighbouring
  dimensions that are one count as one, so only rare tensors have more; those are copied first.

Importing this module imports Triton; `msprobe_integrations.torch.statistics.rows` does so at the first tensor on an accelerator. With
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

from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics import rows as _rows
from msprobe_integrations.torch.statistics.device.bits import values
from msprobe_integrations.torch.statistics.device.tiles import LEAST, MOST, TILE_WORDS, reduce, store

TILES_PER_PROGRAM = 8
MAX_PROGRAMS = 1024
STAGES = 4
"""Tiles that are loaded ahead."""

ROW_BYTES = 8 * _rows.WORDS
KINDS: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in host_kernel.NAMES if hasattr(torch, name) and not name.startswith("complex")
}
"""Types the kernel reads, and their names in it."""

WORDS_WANTED = host_kernel.WANT_DIGEST | host_kernel.WANT_MOMENTS | host_kernel.WANT_BELOW
"""What a caller may want of a row that changes the kernel."""
_W = tl.constexpr(_rows.WORDS)
_PARTS = tl.constexpr(MAX_PROGRAMS)


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
    """Row number p of `out` ([programs, 16] int64): a part of the `n` elements whose bits are at `data`."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    reduce(
        data, data, out + program * _W, n, index0, limit, 0, 0, 0, program, programs, 0, 0, 0, 0, 0, 0, 0,
        KIND, INTEGER, SIZE, DIGEST, MOMENTS, BELOW, STAGES, KIND, -1, 0, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "index0", "limit", "s1", "s2", "s3", "t0", "t1", "t2", "t3"])
def _strided_kernel(
    data,
    out,
    n: tl.int64,
    index0: tl.int64,
    limit: tl.int64,
    s1: tl.int64,
    s2: tl.int64,
    s3: tl.int64,
    t0: tl.int64,
    t1: tl.int64,
    t2: tl.int64,
    t3: tl.int64,
    KIND: tl.constexpr,
    INTEGER: tl.constexpr,
    SIZE: tl.constexpr,
    DIGEST: tl.constexpr,
    MOMENTS: tl.constexpr,
    BELOW: tl.constexpr,
    STAGES: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`_row_kernel` of elements that lie where `_offset` says."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    reduce(
        data, data, out + program * _W, n, index0, limit, 0, 0, 0, program, programs, s1, s2, s3, t0, t1, t2, t3,
        KIND, INTEGER, SIZE, DIGEST, MOMENTS, BELOW, STAGES, KIND, -1, DIMS, WIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["limit"])
def _many_kernel(
    table,
    limit: tl.int64,
    KIND: tl.constexpr,
    INTEGER: tl.constexpr,
    SIZE: tl.constexpr,
    DIGEST: tl.constexpr,
    MOMENTS: tl.constexpr,
    BELOW: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """`_row_kernel` of many tensors: program p does what line p of `table` ([programs, 4] int64) says: addresses of the data and of the
    row, elements, and program + 65536 programs of this tensor. ALIGNED: addresses of data are multiples of 16."""
    line = table + tl.program_id(0).to(tl.int64) * 4
    share = tl.load(line + 3)
    data = _pointer(tl.load(line), KIND, ALIGNED)
    reduce(
        data, data, _pointer(tl.load(line + 1), "int64", True), tl.load(line + 2), share * 0, limit, 0, 0, 0, share & 0xFFFF, share >> 16,
        0, 0, 0, 0, 0, 0, 0, KIND, INTEGER, SIZE, DIGEST, MOMENTS, BELOW, STAGES, KIND, -1, 0, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "limit", "c0", "c1", "c2", "step"])
def _pair_kernel(
    first,
    second,
    out,
    n: tl.int64,
    limit: tl.int64,
    c0: tl.int64,
    c1: tl.int64,
    c2: tl.int64,
    step: tl.int64,
    KIND: tl.constexpr,
    INTEGER: tl.constexpr,
    SIZE: tl.constexpr,
    DIGEST: tl.constexpr,
    MOMENTS: tl.constexpr,
    BELOW: tl.constexpr,
    STAGES: tl.constexpr,
    KIND_B: tl.constexpr,
    OP: tl.constexpr,
    STEP: tl.constexpr,
):
    """Row number p of `out`: a part of the `n` values that the operation OP of `msprobe_engine.core.statistics.pairs` makes of two
    tensors; c and step as in `_factors`."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    f0, f1 = _factors(c0, c1, step, STEP)
    reduce(
        first, second, out + program * _W, n, n * 0, limit, f0, f1, c2.to(tl.int64).to(tl.float64, bitcast=True), program, programs,
        0, 0, 0, 0, 0, 0, 0, KIND, INTEGER, SIZE, DIGEST, MOMENTS, BELOW, STAGES, KIND_B, OP, 0, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["limit"])
def _many_pairs_kernel(
    table,
    limit: tl.int64,
    KIND: tl.constexpr,
    INTEGER: tl.constexpr,
    SIZE: tl.constexpr,
    DIGEST: tl.constexpr,
    MOMENTS: tl.constexpr,
    BELOW: tl.constexpr,
    STAGES: tl.constexpr,
    KIND_B: tl.constexpr,
    OP: tl.constexpr,
    STEP: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """`_pair_kernel` of many pairs: lines of `table` ([programs, 9] int64) as in `_many_kernel`, then the address of the second tensor,
    c0, c1, c2 and step."""
    line = table + tl.program_id(0).to(tl.int64) * 9
    share = tl.load(line + 3)
    first, second = _pointer(tl.load(line), KIND, ALIGNED), _pointer(tl.load(line + 4), KIND_B, ALIGNED)
    f0, f1 = _factors(tl.load(line + 5), tl.load(line + 6), tl.load(line + 8), STEP)
    reduce(
        first, second, _pointer(tl.load(line + 1), "int64", True), tl.load(line + 2), share * 0, limit,
        f0, f1, tl.load(line + 7).to(tl.float64, bitcast=True), share & 0xFFFF, share >> 16,
        0, 0, 0, 0, 0, 0, 0, KIND, INTEGER, SIZE, DIGEST, MOMENTS, BELOW, STAGES, KIND_B, OP, 0, False,
    )  # fmt: skip


@triton.jit
def _factors(c0, c1, step, STEP: tl.constexpr):
    """Two factors (float64) of their bits; or, where the number of steps is on the device (a STEP at the address `step`), Adam's
    corrections 1 / (1 - beta**step) and (1 - beta**step)**-0.5 of the bits of the logarithms of its betas."""
    first = c0.to(tl.int64).to(tl.float64, bitcast=True)
    second = c1.to(tl.int64).to(tl.float64, bitcast=True)
    if STEP != "":
        count = tl.maximum(values(tl.load(_pointer(step.to(tl.int64), STEP, False)), STEP).to(tl.float64), 1.0)
        first = 1.0 / (1.0 - tl.exp(first * count))
        second = 1.0 / tl.sqrt(1.0 - tl.exp(second * count))
    return first, second


@triton.jit
def _pointer(address, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """An address (int64) as that of the bits of elements of a type."""
    if KIND == "float64" or KIND == "int64" or KIND == "uint64":
        pointer = address.to(tl.pointer_type(tl.int64))
    elif KIND == "float32" or KIND == "int32" or KIND == "uint32":
        pointer = address.to(tl.pointer_type(tl.int32))
    elif KIND == "float16" or KIND == "bfloat16" or KIND == "int16" or KIND == "uint16":
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


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
    """`msprobe_engine.core.statistics.rows.merge` of the rows `parts` ([programs, 16] int64) into the row `out`."""
    _merge(parts, out, programs, MOMENTS, BELOW)


@triton.jit
def _merge_many_kernel(table, MOMENTS: tl.constexpr, BELOW: tl.constexpr):
    """`_merge_kernel` once per line of `table` ([n, 3] int64): address of the parts, address of the row, number of parts."""
    line = table + tl.program_id(0).to(tl.int64) * 3
    parts, out = tl.load(line).to(tl.pointer_type(tl.int64)), tl.load(line + 1).to(tl.pointer_type(tl.int64))
    _merge(parts, out, tl.load(line + 2), MOMENTS, BELOW)


@triton.jit
def _merge(parts, out, programs, MOMENTS: tl.constexpr, BELOW: tl.constexpr):
    inside = tl.arange(0, _PARTS) < programs
    flags = tl.max(_word(parts, inside, 12, 0), 0)
    store(
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
        tl.where(flags > 0, MOST, tl.min(_word(parts, inside, 10, MOST), 0)),
        tl.where(flags > 0, LEAST, tl.max(_word(parts, inside, 11, LEAST), 0)),
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
    digest = bool(want & host_kernel.WANT_DIGEST)
    return {"KIND": name, "INTEGER": integer, "SIZE": dtype.itemsize, "DIGEST": digest, **more_words(want), "STAGES": STAGES}


@lru_cache(None)
def pair_constants(first: torch.dtype, second: torch.dtype, op: int, step: torch.dtype | None, want: int) -> dict[str, Any]:
    """Those of `_pair_kernel`; `step`: type of the number of steps where that is on the device."""
    size = 8 if torch.float64 in (first, second) else 4
    kind = {"KIND": KINDS[first], "INTEGER": False, "SIZE": size, "DIGEST": False, **more_words(want), "STAGES": STAGES}
    return {**kind, "KIND_B": KINDS[second], "OP": op, "STEP": "" if step is None else KINDS[step]}


@lru_cache(None)
def more_words(want: int) -> dict[str, bool]:
    """Compile-time arguments of `_merge_kernel`."""
    return {"MOMENTS": bool(want & host_kernel.WANT_MOMENTS), "BELOW": bool(want & host_kernel.WANT_BELOW)}


def elements_per_program(size: int) -> int:
    """How many elements of `size` bytes a program takes as long as there are fewer than `MAX_PROGRAMS`."""
    return (TILE_WORDS // 2 if size == 8 else TILE_WORDS) * TILES_PER_PROGRAM
