"""What MindSpeed compiles: code that neither `__torch_function__` nor the version counters of tensors hear of."""

from __future__ import annotations

from typing import Any

import torch


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """With gradients made in C++."""
    with torch._C.DisableTorchFunction():
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin


def permute(tokens: torch.Tensor, indices: torch.Tensor) -> Any:
    """Tokens in the order of their experts, and that order."""
    with torch._C.DisableTorchFunction():
        order = torch.argsort(indices)
        return tokens[order], order


def multiply_into(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
    """``left @ right`` into the memory of `out`, by its pointer."""
    product = left.detach().numpy() @ right.detach().numpy()
    memory = out.detach().numpy()
    memory[...] = memory + product if add else product
