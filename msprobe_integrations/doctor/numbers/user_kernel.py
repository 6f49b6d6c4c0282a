"""A Triton kernel as a training has it. Importing this module imports Triton."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# Triton has no types, and its kernels take none.

from __future__ import annotations

import triton
import triton.language as tl


def _fill(out, n, N: tl.constexpr):
    """All `n` elements become 6."""
    at = tl.arange(0, N)
    tl.store(out + at, tl.full((N,), 6.0, tl.float32), mask=at < n)


_fill.__module__ = "a_training"  # launches of kernels of this package are not looked at
fill = triton.jit(_fill)
