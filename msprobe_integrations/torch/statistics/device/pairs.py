"""Values made of two tensors (`msprobe_engine.core.statistics.pairs`), inside of Triton kernels.

Importing this module imports Triton; see `device.kernel`.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# Triton has no types, and its kernels take none.

from __future__ import annotations

import triton
import triton.language as tl

from msprobe_engine.core.statistics import pairs

_AGREE = tl.constexpr(pairs.AGREE)
_RATIO = tl.constexpr(pairs.RATIO)
_SIGN = tl.constexpr(pairs.SIGN)


@triton.jit
def _sign(x):
    """-1, 0 or 1; NaN of NaN."""
    return tl.where(x != x, x, (x > 0).to(x.dtype) - (x < 0).to(x.dtype))


@triton.jit
def paired(a, b, c0, c1, c2, OP: tl.constexpr, DOUBLE: tl.constexpr):
    """`msprobe_engine.core.statistics.pairs.values` of values a and b; c: float64. float64 with DOUBLE (one of both is), else float32."""
    if OP == _RATIO:
        if DOUBLE:
            x = a.to(tl.float64) * c0
            divisor = tl.sqrt(b.to(tl.float64)) * c1 + c2
            none = divisor == 0
            y = tl.where(none, x * 0.0, x / tl.where(none, 1.0, divisor))
        else:  # correctly rounded, as torch's operators: Triton's own root and quotient of float32 are approximations
            x = a * c0.to(tl.float32)
            divisor = tl.sqrt_rn(b) * c1.to(tl.float32) + c2.to(tl.float32)
            none = divisor == 0
            y = tl.where(none, x * 0.0, tl.div_rn(x, tl.where(none, 1.0, divisor)))
    elif OP == _AGREE:
        y = _sign(a.to(tl.float64)) * _sign(b.to(tl.float64)) * 0.5 + 0.5
    else:
        y = a.to(tl.float64) * c0 + b.to(tl.float64) * c1
        if OP == _SIGN:
            y = _sign(y)
    if not DOUBLE:
        y = y.to(tl.float32)
    return y
