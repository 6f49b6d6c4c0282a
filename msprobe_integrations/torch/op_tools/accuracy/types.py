"""Floating types of both sides: what the bench runs in, and how an input is changed by one unit of round-off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Types = Mapping[torch.dtype, torch.dtype]

FLOAT8 = tuple(t for n in dir(torch) if n.startswith("float8_") and isinstance(t := getattr(torch, n), torch.dtype))
LOW = (torch.float16, torch.bfloat16)
WIDE: Types = {
    **dict.fromkeys((*LOW, torch.float32, *FLOAT8), torch.float64),
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
RAISED: Types = {**dict.fromkeys((*LOW, *FLOAT8), torch.float32), torch.float32: torch.float64, torch.complex64: torch.complex128}
BENCHES: Mapping[str, Types] = {"float64": WIDE, "raised": RAISED, "same": {}}
"""Values of `Bench.dtype`."""

KEPT = frozenset(
    (
        *("histc", "histogram", "histogramdd", "nextafter", "nextafter_", "nan_to_num", "nan_to_num_", "fake_quantize_per_tensor_affine"),
        *("fake_quantize_per_channel_affine", "quantize_per_tensor", "quantize_per_channel"),
    )
)
"""Operators whose result is made for the type (edges of bins, the next number, the largest number): the bench keeps it."""


def floats_of(values: Iterable[Any]) -> set[torch.dtype]:
    """Floating types among the tensors of `values`; of complex ones that of their parts."""
    kinds = {v.dtype for v in values if isinstance(v, torch.Tensor)}
    return {kind.to_real() for kind in kinds if kind.is_floating_point or kind.is_complex}


def coarsest(types: Iterable[torch.dtype]) -> torch.dtype | None:
    """The one with the largest round-off."""
    return max((t for t in types if t.is_floating_point), key=lambda t: torch.finfo(t).eps, default=None)


def attempts(bench: str, api: str) -> list[Types]:
    """In which types the bench is tried, one after the other: kernels do not exist for all of them."""
    if api in KEPT or bench == "same":
        return [{}]
    return [BENCHES[bench], RAISED, {}] if bench == "float64" else [BENCHES[bench], {}]


BLOCK = 1 << 20
"""Elements that are changed at a time; tensors of more are large."""


def nudge_tensor(tensor: torch.Tensor, unit: torch.dtype, signs: Callable[[torch.Size], torch.Tensor]) -> torch.Tensor:
    """Every value of a float tensor up or down by one unit of round-off of the coarser of its type and `unit`, in float64 (complex
    types: complex128). NaN and Inf stay.

    Args:
        signs: the next -1 and 1 of a shape; of a large tensor it is asked for blocks.
    """
    if tensor.dtype.is_complex:
        return torch.view_as_complex(nudge_tensor(torch.view_as_real(tensor), unit, signs))
    eps = max(torch.finfo(tensor.dtype).eps, torch.finfo(unit).eps)
    wide = tensor.to(torch.float64, copy=True)
    move(wide, signs, eps / 2)
    return wide


def move(wide: torch.Tensor, signs: Callable[[torch.Size], torch.Tensor], unit: float) -> None:
    """Change every finite value of a float64 tensor by the factor 1 + sign * unit, in place. (Not by a product: 1 + ... would be a number
    of the default type, which may be too coarse.)"""
    small = wide.numel() <= BLOCK or not wide.is_contiguous()
    for part in (wide,) if small else wide.view(-1).split(BLOCK):
        part.add_((part * signs(part.shape)).nan_to_num_(0.0, 0.0, 0.0), alpha=unit)
