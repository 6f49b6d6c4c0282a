"""Operators that only move values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msprobe_integrations.torch.op_tools.accuracy.references.formula import Formula


def confusion_transpose(x: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """Permuted and reshaped, in this order or the other."""
    if transpose_first:
        return x.permute(*perm).contiguous().view(*shape)
    return x.view(*shape).permute(*perm)


def sort_v2(x: Tensor, dim: int = -1, descending: bool = False, out: Tensor | None = None) -> Tensor:
    """The values of the sort alone."""
    values = torch.sort(x, dim=dim, descending=descending).values
    return values if out is None else out.copy_(values)


def confusion_transpose_backward(grad: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """The way back of `confusion_transpose`; `shape` is that of its input."""
    back = [list(perm).index(n) for n in range(len(perm))]
    if transpose_first:
        return grad.reshape([shape[n] for n in perm]).permute(*back)
    return grad.permute(*back).reshape(*shape)


FORMULAS: dict[str, Formula] = {
    "npu_confusion_transpose": confusion_transpose,
    "npu_confusion_transpose_backward": confusion_transpose_backward,
    "npu_sort_v2": sort_v2,
}
