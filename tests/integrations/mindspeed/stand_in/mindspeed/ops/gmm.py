"""Grouped matmul: a function over an operator of torch over a function of autograd over the extension."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.ops import extension

__all__ = ["npu_gmm"]

library = torch.library.Library("mindspeed", "DEF")
library.define("npu_gmm(Tensor x, Tensor weight) -> Tensor")


class GMMFunction(torch.autograd.Function):
    """Writes into buffers of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        """``x @ weight``."""
        ctx.save_for_backward(x, weight)
        out = torch.empty(x.shape[0], weight.shape[1])
        extension.multiply_into(x, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Both gradients."""
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


library.impl("npu_gmm", GMMFunction.apply, "CompositeImplicitAutograd")


def npu_gmm(x: Any, weight: Any, *, bias: Any = None, group_list: Any = None, group_type: int = 0) -> Any:
    """As the layers of experts call it."""
    del bias, group_list, group_type
    return torch.ops.mindspeed.npu_gmm(x, weight)
