"""Tensors that stand for other values than those they hold: wrappers of codes and scales that have a ``dequantize()`` (Transformer Engine,
torchao). Statistics, digests and files are of the values; what is known of codes and scales are extras of the description. Names of
members are Transformer Engine's.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from msprobe_engine.core.guard import suppress_faults
from msprobe_integrations.torch.statistics import device_rows
from msprobe_integrations.torch.statistics import rows as statistics
from msprobe_integrations.torch.tensors.dtensors import local

Tensor = torch.Tensor
_no_dispatch = torch._C._disabled_torch_dispatch_impl
BLOCK_BYTES = 64 << 20
"""Values of a larger tensor are made in blocks of rows of this size, where its class can be cut."""
_BLOCKWISE = 128
_MX, _NV = 32, 16
"""Elements with one scale in a row of `MXFP8Tensor` and `NVFP4Tensor`."""


def is_quantized(cls: type) -> bool:
    """Do tensors of this class hold codes? Told by a ``dequantize`` of its own."""
    return getattr(cls, "dequantize", None) is not Tensor.dequantize and cls.__torch_dispatch__ is not _no_dispatch  # type: ignore[attr-defined]


def facts(tensor: Any) -> tuple[tuple[str, Any], ...]:
    """What a quantized tensor says of itself without a look at the device."""
    found = []
    for member in ("_fp8_dtype", "_fp4_dtype"):
        if (kind := getattr(tensor, member, None)) is not None:
            found.append((member[1:], str(kind).removeprefix("DType.k").removeprefix("torch.")))
    if (quantizer := getattr(tensor, "_quantizer", None)) is not None:
        found.append(("quantizer", type(quantizer).__name__))
        with suppress_faults():  # older versions have no such method, a recipe of one's own may have no class
            found.append(("recipe", quantizer._get_compatible_recipe().__name__))
    return tuple(found)


def scales(tensor: Any) -> Tensor | None:
    """The inverse scales of a quantized tensor, as a view of what it holds: of rows, without what only fills their memory up. None where
    it has none, or in an order that is not known."""
    tensor = local(tensor)
    inverse = getattr(tensor, "_scale_inv", None)
    if isinstance(inverse, Tensor):
        return inverse
    inverse = getattr(tensor, "_rowwise_scale_inv", None)
    if not isinstance(inverse, Tensor) or inverse.dim() != 2 or not tensor.numel() or getattr(tensor, "_with_gemm_swizzled_scales", False):
        return None
    width = tensor.shape[-1]
    height = tensor.numel() // width
    if inverse.dtype == torch.uint8:  # one byte per scale: a power of two, or e4m3
        fp4 = hasattr(tensor, "_fp4_dtype")
        kind = torch.float8_e4m3fn if fp4 else getattr(torch, "float8_e8m0fnu", None)
        if kind is None:
            return None
        inverse, used = inverse.view(kind), (height, math.ceil(width / (_NV if fp4 else _MX)))
    else:
        square = getattr(tensor, "_is_2D_scaled", None)
        high, wide = math.ceil(height / _BLOCKWISE), math.ceil(width / _BLOCKWISE)
        used = (inverse.shape[0], inverse.shape[1]) if square is None else (high, wide) if square else (wide, height)
    return inverse[: used[0], : used[1]] if used[0] <= inverse.shape[0] and used[1] <= inverse.shape[1] else None


def blocks_of(tensor: Any) -> int:
    """In how many blocks the values of a tensor are made; 1: at once. A class with one scale for all elements (`Float8Tensor`) can be cut;
    with scales of blocks it makes all its values to give some."""
    size = int(tensor.numel() * tensor.element_size())
    data = getattr(tensor, "_data", None)
    if size <= BLOCK_BYTES or not isinstance(data, Tensor) or data.shape != tensor.shape or not data.is_contiguous():
        return 1
    rows = int(tensor.shape[0])
    return math.ceil(rows / max(1, rows * BLOCK_BYTES // size))


def reduce_blocks(tensor: Any, blocks: int, take: device_rows.Taker, want: int) -> None:
    """Write the rows of the values of a tensor, with the temporary memory of one block."""
    rows, each = int(tensor.shape[0]), math.ceil(tensor.shape[0] / blocks)
    inner = tensor.numel() // rows
    for start in range(0, rows, each):
        block = torch.ops.aten.slice.Tensor(tensor, 0, start, min(rows, start + each))
        values = block.dequantize() if is_quantized(type(block)) else block
        statistics.reduce_device(values, take, want, start * inner)
