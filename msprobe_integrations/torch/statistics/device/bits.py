"""Elements of a tensor from their bits, inside of Triton kernels: every GPU reads every type, also those it has no instructions for.

Importing this module imports Triton; see `device.kernel`.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# Triton has no types, and its kernels take none.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _float8(bits, KIND: tl.constexpr):
    """Values (float32) of 8-bit floats, by integer arithmetic; formats as in `msprobe_engine.core.statistics.host_kernel.fp8_table`."""
    b = bits.to(tl.int32)
    if KIND == "float8_e8m0fnu":
        normal = tl.where(b == 0, 0x00400000, b << 23).to(tl.float32, bitcast=True)
        value = tl.where(b == 255, float("nan"), normal)
    else:
        M: tl.constexpr = 3 if KIND == "float8_e4m3fn" or KIND == "float8_e4m3fnuz" else 2
        FNUZ: tl.constexpr = KIND == "float8_e4m3fnuz" or KIND == "float8_e5m2fnuz"
        BIAS: tl.constexpr = (1 << (6 - M)) - (0 if FNUZ else 1)
        UNIT: tl.constexpr = 2.0 ** (1 - BIAS - M)
        exponent = (b & 127) >> M
        fraction = b & ((1 << M) - 1)
        normal = (((exponent + (127 - BIAS)) << 23) | (fraction << (23 - M))).to(tl.float32, bitcast=True)
        size = tl.where(exponent == 0, fraction.to(tl.float32) * UNIT, normal)
        if KIND == "float8_e4m3fn":
            size = tl.where((b & 127) == 127, float("nan"), size)
        elif KIND == "float8_e5m2":
            size = tl.where(exponent == 31, tl.where(fraction == 0, float("inf"), float("nan")), size)
        else:
            size = tl.where(b == 128, float("nan"), size)
        value = tl.where(b > 127, -size, size)
    return value


@triton.jit
def values(bits, KIND: tl.constexpr):
    """The elements whose bits are `bits`: float32, float64 for float64, int64, uint64 for uint64."""
    if KIND == "float32":
        value = bits.to(tl.float32, bitcast=True)
    elif KIND == "float64":
        value = bits.to(tl.float64, bitcast=True)
    elif KIND == "float16":
        value = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "bfloat16":
        value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "int8":
        value = bits.to(tl.int8, bitcast=True).to(tl.int64)
    elif KIND == "uint16":
        value = bits.to(tl.uint16, bitcast=True).to(tl.int64)
    elif KIND == "uint32":
        value = bits.to(tl.uint32, bitcast=True).to(tl.int64)
    elif KIND == "uint64":
        value = bits.to(tl.uint64, bitcast=True)
    elif KIND == "bool":
        value = (bits != 0).to(tl.int64)
    elif KIND == "uint8" or KIND == "int16" or KIND == "int32" or KIND == "int64":
        value = bits.to(tl.int64)
    else:
        value = _float8(bits, KIND)
    return value


@triton.jit
def unsigned(bits, SIZE: tl.constexpr):
    """`bits` zero-extended to uint64."""
    if SIZE == 2:
        wide = bits.to(tl.uint16, bitcast=True).to(tl.uint64)
    elif SIZE == 4:
        wide = bits.to(tl.uint32, bitcast=True).to(tl.uint64)
    elif SIZE == 8:
        wide = bits.to(tl.uint64, bitcast=True)
    else:
        wide = bits.to(tl.uint64)
    return wide
