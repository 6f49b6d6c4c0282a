"""What round-off inside of an operator makes of its result: every intermediate result is changed by about one unit, up or down by chance.

Changed inputs do not tell everything of an operator's condition. A gradient that is exactly zero, because two equal terms cancel, stays
zero for all inputs, and every kernel that computes the terms one after the other has their round-off there. So operators are taken apart
into the steps of their definition (torch's own decompositions), and the result of each step is changed (Monte Carlo arithmetic). How far is
drawn too, half a unit to one and a half: of four whole units, up or down, every third sum is none at all, and a gradient that is the
difference of two equal numbers (a softmax whose probability is 1) would seem to have no round-off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_engine.core.operator_traits import UNINITIALISED
from msprobe_integrations.torch.op_tools.accuracy.types import move

_EXACT = frozenset([
    *UNINITIALISED, "_to_copy", "abs", "amax", "amin", "arange", "bitwise_not", "cat", "ceil", "clamp", "clamp_max", "clamp_min",
    "clone", "constant_pad_nd", "contiguous", "copy", "copy_", "detach", "embedding", "eye", "fill", "fill_", "flip", "floor",
    "full", "full_like", "gather", "index", "index_select", "kthvalue", "lift_fresh", "lift_fresh_copy", "masked_fill",
    "masked_fill_", "masked_select", "max", "maximum", "median", "min", "minimum", "mode", "neg", "new_full", "new_zeros", "ones",
    "ones_like", "relu", "repeat", "roll", "round", "scalar_tensor", "scatter", "select_scatter", "sgn", "sign", "slice_scatter",
    "sort", "stack", "threshold", "threshold_backward", "topk", "tril", "triu", "trunc", "where", "zero_", "zeros", "zeros_like",
])  # fmt: skip
"""Operators that move values or choose among them."""
_WHOLE = frozenset(("cumsum", "cumprod"))
"""Operators whose definition there takes the square of their size in memory."""


@lru_cache(maxsize=1)
def _decompositions() -> Any:
    from torch._decomp import decomposition_table  # takes a moment, and most calls never need it

    return decomposition_table


class _RoundOff(TorchDispatchMode):
    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit = unit
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        steps: Callable[..., Any] | None = None if name in _EXACT or name in _WHOLE or func.is_view else _decompositions().get(func)
        if steps is not None and not func._schema.is_mutable:
            with self:
                result = steps(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not func.is_view and name not in _EXACT:
            for out in result if isinstance(result, (list, tuple)) else (result,):
                self._change(out)
        return result

    def _change(self, out: Any) -> None:
        if not isinstance(out, torch.Tensor) or out.dtype not in (torch.float64, torch.complex128):
            return
        with torch.no_grad():
            parts = torch.view_as_real(out) if out.is_complex() else out
            move(parts, lambda shape: self._changes(shape).to(out.device), self._unit)

    def _changes(self, shape: torch.Size) -> torch.Tensor:
        """In units, 0.5 to 1.5 in size; float32, also while another type is the default."""
        drawn = torch.rand(shape, generator=self._generator, dtype=torch.float32).mul_(2).sub_(1)
        return drawn.add_(drawn.sign().mul_(0.5))


@contextmanager
def rounding(unit: torch.dtype, seed: int) -> Iterator[None]:
    """Within, every step in float64 (complex128) is changed by about one unit of round-off of `unit`, forward and backward."""
    with sdpa_kernel(SDPBackend.MATH), _RoundOff(torch.finfo(unit).eps / 2, seed):
        yield
