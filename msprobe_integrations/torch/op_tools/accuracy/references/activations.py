"""Activations and gates, the masked softmax of scores, and rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from msprobe_integrations.torch.op_tools.accuracy.references.formula import Formula, gradient_of, require


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """The first half, through SiLU, times the second."""
    first, second = torch.chunk(x, 2, dim)
    return functional.silu(first) * second


def clipped_swiglu(
    x: Tensor, *, group_index: Tensor | None = None, dim: int = -1, alpha: float = 1.702, limit: float = 7.0, bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:  # fmt: skip
    """``a * sigmoid(alpha * a) * (b + bias)``, a clipped from above and b from both sides at `limit`. a and b are the even and odd
    elements of the axis `dim` and all behind it, seen as one, or its halves."""
    before = x.shape[: dim % x.dim()].numel()
    flat = x.reshape(before, -1)
    require(group_index is None or int(group_index.sum()) >= before, "rows that are in no group: their result is not defined")
    a, b = (flat[:, ::2], flat[:, 1::2]) if interleaved else torch.chunk(flat, 2, -1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    shape = list(x.shape)
    shape[dim] //= 2
    return (a * torch.sigmoid(alpha * a) * (b + bias)).reshape(shape)


def fast_gelu(x: Tensor) -> Tensor:
    """GELU by a sigmoid."""
    return x * torch.sigmoid(1.702 * x)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU, by the error function or (``tanh``) its approximation."""
    return functional.gelu(x, approximate=approximate)


_gelu_backward = gradient_of(gelu, 1, "grad_output")


def gelu_mul(x: Tensor, *, approximate: str = "none") -> Tensor:
    """The first half of the last axis, through GELU, times the second."""
    first, second = torch.chunk(x, 2, -1)
    return gelu(first, approximate=approximate) * second


_APPROXIMATE = ("none", "tanh")


def geglu(x: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    """(one half times the GELU of the other, this GELU); that of the second half, or (`activate_left`) of the first. The second result
    has no gradient."""
    require(approximate in (0, 1), f"approximate {approximate} is not known to the formula")
    plain, through = _halves(x, dim, activate_left)
    activated = gelu(through, approximate=_APPROXIMATE[approximate])
    return plain * activated, activated.detach()


def geglu_grad(grad_output: Tensor, x: Tensor, gelu: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> Tensor:
    """Its gradient, from the kept GELU."""
    require(approximate in (0, 1), f"approximate {approximate} is not known to the formula")
    plain, through = _halves(x, dim, activate_left)
    of_through = _gelu_backward(grad_output * plain, through, approximate=_APPROXIMATE[approximate])
    parts = (of_through, grad_output * gelu)
    return torch.cat(parts if activate_left else parts[::-1], dim)


def _halves(x: Tensor, dim: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    """(the half that is taken as it is, the half that goes through the GELU)."""
    first, second = torch.chunk(x, 2, dim)
    return (second, first) if activate_left else (first, second)


def mish(x: Tensor) -> Tensor:
    return functional.mish(x)


def silu(x: Tensor) -> Tensor:
    return functional.silu(x)


def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """Rotary position embedding with cosines `r1` and sines `r2`: ``x * r1 + turned * r2``. Turned are the halves of the last axis, its
    pairs (``interleave``), or ``x @ rotate``."""
    if rotate is not None:
        turned = x @ rotate
    elif rotary_mode == "half":
        first, second = torch.chunk(x, 2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        require(rotary_mode == "interleave", f"rotary_mode {rotary_mode[:20]!r} is not known to the formula")
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x * r1 + turned * r2


def rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """`rotary_mul` by the names of ``mindspeed.ops``; `mode` 0 is ``half``, 1 ``interleave``."""
    require(mode in (0, 1), f"mode {mode} is not known to the formula")
    return rotary_mul(x, cos, sin, ("half", "interleave")[mode])


def _rotary_for_backward(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    return rotary_mul(x, r1, r2, rotary_mode)


def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    """Softmax of the scaled scores; masked ones are -10000."""
    return torch.softmax((x * scale).masked_fill(_mask(x, mask, fixed_triu_mask), -10000.0), -1)


def scaled_masked_softmax_backward(y_grad: Tensor, y: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    """Its gradient, from its result."""
    inner = (y_grad - (y_grad * y).sum(-1, keepdim=True)) * y * scale
    return inner.masked_fill(_mask(y, mask, fixed_triu_mask), 0.0)


def _mask(x: Tensor, mask: Tensor, upper: bool) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1) if upper else mask.bool()


FORMULAS: dict[str, Formula] = {
    "npu_swiglu": swiglu,
    "npu_swiglu_backward": gradient_of(swiglu, 1, "grad_output"),
    "npu_clipped_swiglu": clipped_swiglu,
    "npu_fast_gelu": fast_gelu,
    "fast_gelu": fast_gelu,
    "npu_fast_gelu_backward": gradient_of(fast_gelu, 1),
    "npu_gelu": gelu,
    "npu_gelu_backward": _gelu_backward,
    "npu_gelu_mul": gelu_mul,
    "npu_geglu": geglu,
    "npu_geglu_grad": geglu_grad,
    "npu_mish": mish,
    "npu_silu": silu,
    "npu_rotary_mul": rotary_mul,
    "npu_rotary_mul_backward": gradient_of(_rotary_for_backward, 3),
    "MindSpeed.npu_rotary_position_embedding": rotary_position_embedding,
    "npu_scaled_masked_softmax": scaled_masked_softmax,
    "npu_scaled_masked_softmax_backward": scaled_masked_softmax_backward,
}
