"""Rows of values that are made of two tensors a and b, element by element, without a tensor of these values.

==========  =======================================================================================================
op          value y
==========  =======================================================================================================
``AGREE``   1 where a and b have the same sign, 0 where they have different ones, 0.5 where one of them is zero; NaN where one is NaN.
            That is (1 + sign(a) sign(b)) / 2, and its mean is the share of elements that agree.
``RATIO``   a c0 / (sqrt(b) c1 + c2), and 0 a where the divisor is 0
``LINEAR``  c0 a + c1 b
``SIGN``    sign(c0 a + c1 b), NaN where that is NaN
==========  =======================================================================================================

a and b may be float64, float32, float16 and bfloat16 in any combination. y is float64 when one of them is, else float32; RATIO is
computed in the type of y, the others in float64.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics import rows as _rows

AGREE, RATIO, LINEAR, SIGN = 0, 1, 2, 3
CODES = frozenset(host_kernel.CODES[name] for name in ("float32", "float64", "float16", "bfloat16"))
"""Kernel codes of the types that may be paired."""

Constants = tuple[float, float, float]


def reduce(op: int, a: int, code_a: int, b: int, code_b: int, numel: int, out_ptr: int, want: int, c: Constants = (0.0, 0.0, 0.0)) -> None:
    """Write the row of y to the 128 bytes at `out_ptr`; by the C kernel, or numpy with the same result.

    Args:
        a, b: addresses of `numel` contiguous elements each, of the types `code_a` and `code_b` (of `CODES`).
        want: as of `host_kernel.reduce`; these rows have no digest and no checksums.
    """
    kernel = host_kernel.kernel()
    if kernel is not None:
        kernel.reduce_pair(op, a, code_a, b, code_b, numel, out_ptr, want, *c)
        return
    x, y = (host_kernel.decode(host_kernel.bytes_at(p, (numel,), (1,), code), code) for p, code in ((a, code_a), (b, code_b)))
    made = values(op, x, y, c)
    without = want & ~(host_kernel.WANT_DIGEST | host_kernel.WANT_CRC | host_kernel.WANT_XOR)
    row = host_kernel.row_of(made.view(np.uint8), host_kernel.CODES[made.dtype.name], without, 0)
    np.ctypeslib.as_array((ctypes.c_double * _rows.WORDS).from_address(out_ptr))[:] = row


def values(op: int, a: npt.NDArray[Any], b: npt.NDArray[Any], c: Constants) -> npt.NDArray[Any]:
    """The definition, in numpy: y of two flat arrays."""
    made = np.float64 if np.float64 in (a.dtype, b.dtype) else np.float32
    with np.errstate(all="ignore"):
        if op == RATIO:
            x, y, (c0, c1, c2) = a.astype(made), b.astype(made), np.asarray(c, made)
            divisor = np.sqrt(y) * c1 + c2
            none = divisor == 0
            return np.asarray(np.where(none, x * c0 * 0, x * c0 / np.where(none, 1, divisor)), made)
        wide, other = a.astype(np.float64), b.astype(np.float64)
        if op == AGREE:
            return ((1.0 + np.sign(wide) * np.sign(other)) / 2.0).astype(made)
        total = c[0] * wide + c[1] * other
        return np.asarray(np.sign(total) if op == SIGN else total, made)
