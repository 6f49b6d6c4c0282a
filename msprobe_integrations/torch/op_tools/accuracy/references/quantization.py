"""Quantization of each row (token) to 8 bits, with a scale from the row itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msprobe_integrations.torch.op_tools.accuracy.references.formula import Formula, ends_of, require

_INT8 = (None, torch.int8, 1)
"""``dst_type``; 1 is the number that torch has for it."""
_MAX, _MIN = 127, -128


def _apply_smooth_scales(
    x: Tensor, smooth_scales: Tensor | None, group_index: Tensor | None, dst_type: Any, quant_mode: str, largest: float
) -> Tensor:
    require(dst_type in _INT8, f"dst_type {dst_type} is not known to the formula: only int8 is")
    require(quant_mode == "pertoken" and not largest, "only one scale for each token has a formula")
    if smooth_scales is None:
        return x
    if group_index is None:
        return x * smooth_scales
    ends = ends_of(group_index)
    rows = x.flatten(0, -2)
    require(ends[-1:] == [len(rows)], "rows that are in no group: their result is not defined")
    lengths = torch.as_tensor([end - begin for begin, end in zip([0, *ends], ends)], device=x.device)
    return (rows * smooth_scales.repeat_interleave(lengths, 0)).view(x.shape)


def dynamic_quant(
    x: Tensor, *, smooth_scales: Tensor | None = None, group_index: Tensor | None = None, dst_type: Any = None,
    quant_mode: str = "pertoken", dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(x over its scale, rounded; scale: the largest magnitude of each row over 127)."""
    x = _apply_smooth_scales(x, smooth_scales, group_index, dst_type, quant_mode, dst_type_max)
    scale = x.abs().amax(-1) / _MAX
    require(bool((scale != 0).all()), "rows of zeros: their result is not defined")
    return torch.round(x / scale[..., None]).to(torch.int8), scale


def dynamic_quant_asymmetric(
    x: Tensor, *, smooth_scales: Tensor | None = None, group_index: Tensor | None = None, dst_type: Any = None,
    quant_mode: str = "pertoken", dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(x over its scale, shifted and rounded; scale: the range of each row over 255; shift: what puts the maximum at 127)."""
    x = _apply_smooth_scales(x, smooth_scales, group_index, dst_type, quant_mode, dst_type_max)
    high = x.amax(-1)
    scale = (high - x.amin(-1)) / (_MAX - _MIN)
    require(bool((scale != 0).all()), "rows of one value: their result is not defined")
    offset = _MAX - high / scale
    return torch.round(x / scale[..., None] + offset[..., None]).clamp(_MIN, _MAX).to(torch.int8), scale, offset


FORMULAS: dict[str, Formula] = {"npu_dynamic_quant": dynamic_quant, "npu_dynamic_quant_asymmetric": dynamic_quant_asymmetric}
