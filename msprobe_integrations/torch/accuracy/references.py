"""Formulas of fused operators, for the bench: operators of torch_npu by operations that torch has everywhere.

Arguments and results are those of torch_npu's documentation; of results that only its backward reads (statistics of the softmax, seeds)
those that have a meaning of their own are given. All are differentiable, so gradients come from autograd; the operators that are a
backward themselves (recorded as ``Aten.npu_swiglu_backward``) are the gradient of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Formula = Callable[..., Any]


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(y, reciprocal root of the mean square over the axes of `gamma`)."""
    axes = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon)
    return x * rstd * gamma, rstd


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """The first half, through SiLU, times the second."""
    first, second = torch.chunk(x, 2, dim)
    return torch.nn.functional.silu(first) * second


def fast_gelu(x: Tensor) -> Tensor:
    """GELU by a sigmoid."""
    return x * torch.sigmoid(1.702 * x)


def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """Rotary position embedding with cosines `r1` and sines `r2`."""
    if rotary_mode == "half":
        first, second = torch.chunk(x, 2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x * r1 + turned * r2


def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    """Softmax of the scaled scores; masked ones are -10000."""
    return torch.softmax((x * scale).masked_fill(_mask(x, mask, fixed_triu_mask), -10000.0), -1)


def scaled_masked_softmax_backward(y_grad: Tensor, y: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    """Its gradient, from its result."""
    inner = (y_grad - (y_grad * y).sum(-1, keepdim=True)) * y * scale
    return inner.masked_fill(_mask(y, mask, fixed_triu_mask), 0.0)


def _mask(x: Tensor, mask: Tensor, upper: bool) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1) if upper else mask.bool()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``."""
    return torch.nn.functional.linear(x, weight, bias)


def layer_norm_eval(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer norm."""
    return torch.nn.functional.layer_norm(input, list(normalized_shape), weight, bias, eps)


def group_norm_silu(input: Tensor, weight: Tensor, bias: Tensor, group: int, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    """(SiLU of the group norm, mean, reciprocal standard deviation)."""
    inner = math.prod(input.shape[2:])
    y, mean, rstd = torch.ops.aten.native_group_norm(input, weight, bias, input.shape[0], input.shape[1], inner, group, eps)
    return torch.nn.functional.silu(y), mean, rstd


def mish(x: Tensor) -> Tensor:
    """Mish."""
    return torch.nn.functional.mish(x)


def confusion_transpose(x: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """Permuted and reshaped, in this order or the other."""
    if transpose_first:
        return x.permute(*perm).contiguous().view(*shape)
    return x.view(*shape).permute(*perm)


def sort_v2(x: Tensor, dim: int = -1, descending: bool = False, out: Tensor | None = None) -> Tensor:
    """The values of the sort alone."""
    values = torch.sort(x, dim=dim, descending=descending).values
    return values if out is None else out.copy_(values)


def moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(weights of the k best experts, their numbers, numbers of the rows column by column). A finished row has the number of experts
    for all of its experts."""
    weights = torch.softmax(x, -1)
    order = torch.sort(weights, stable=True, dim=-1, descending=True).indices[..., :k]
    best = weights.gather(-1, order)
    if finished is not None:
        order = torch.where(finished.reshape(*order.shape[:-1], 1), x.shape[-1], order)
    rows = math.prod(order.shape[:-1])
    numbers = torch.arange(rows * k, device=x.device).reshape(k, rows).t().reshape(order.shape)
    return best, order.int(), numbers.int()


def apply_adam(
    beta1_power: Any, beta2_power: Any, lr: Any, beta1: Any, beta2: Any, epsilon: Any, grad: Tensor, use_locking: Any = None,
    use_nesterov: Any = None, *, out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(parameter, first moment, second moment) after one step; `out` has them as they are before."""
    del use_locking
    var, m, v = out
    m_new = beta1 * m + (1 - beta1) * grad
    v_new = beta2 * v + (1 - beta2) * grad * grad
    rate = lr * (1 - beta2_power) ** 0.5 / (1 - beta1_power)
    direction = beta1 * m_new + (1 - beta1) * grad if use_nesterov else m_new
    return var - rate * direction / (v_new.sqrt() + epsilon), m_new, v_new


def apply_adam_w(
    beta1_power: Any, beta2_power: Any, lr: Any, weight_decay: Any, beta1: Any, beta2: Any, epsilon: Any, grad: Tensor,
    max_grad_norm: Tensor | None = None, amsgrad: bool | None = False, maximize: bool | None = False, *, out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(parameter, first moment, second moment) after one step; `out` has them as they are before, the powers are those of the step
    before."""
    var, m, v = out
    gradient = -grad if maximize else grad
    m_new = beta1 * m + (1 - beta1) * gradient
    v_new = beta2 * v + (1 - beta2) * gradient * gradient
    largest = torch.maximum(max_grad_norm, v_new) if amsgrad and max_grad_norm is not None else v_new
    size = (largest / (1 - beta2_power * beta2)).sqrt() + epsilon
    return var * (1 - lr * weight_decay) - lr * m_new / (1 - beta1_power * beta1) / size, m_new, v_new


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = 2147483647, next_tockens: int = 2147483647, inner_precise: int = 0, prefix: Any = None,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False,
) -> tuple[Tensor]:  # fmt: skip
    """The attention, in the layout of its inputs (``BSH``, ``SBH``, ``BSND``, ``BNSD``, ``TND``).

    Raises:
        NotImplementedError: dropout, a prefix or a layout without a formula.
    """
    del padding_mask, inner_precise, gen_mask_parallel, sync
    if keep_prob != 1.0:
        raise NotImplementedError("attention with dropout draws random numbers")
    if prefix or sparse_mode in (5, 6, 7, 8):
        raise NotImplementedError(f"there is no formula for sparse_mode {sparse_mode}")
    windows = (sparse_mode, pre_tockens, next_tockens)
    if input_layout == "TND":
        if actual_seq_qlen is None or actual_seq_kvlen is None or pse is not None:
            raise NotImplementedError("layout TND needs the lengths of its sequences, and has no formula with pse")
        parts = []
        starts = zip([0, *actual_seq_qlen], actual_seq_qlen, [0, *actual_seq_kvlen], actual_seq_kvlen)
        for q0, q1, k0, k1 in starts:
            q, k, v = (t.transpose(0, 1)[None] for t in (query[q0:q1], key[k0:k1], value[k0:k1]))
            parts.append(_attend(q, k, v, None, atten_mask, scale, windows)[0].transpose(0, 1))
        return (torch.cat(parts),)
    q = _heads_second(query, head_num, input_layout)
    size = q.shape[-1]
    k, v = (_heads_second(t, t.shape[-1] // size, input_layout) for t in (key, value))
    return (_heads_back(_attend(q, k, v, pse, atten_mask, scale, windows), input_layout),)


def _heads_second(x: Tensor, heads: int, layout: str) -> Tensor:
    """[batch, heads, sequence, size] of a tensor in `layout`."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "BSH":
        return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)
    if layout == "SBH":
        return torch.unflatten(x, -1, (heads, -1)).permute(1, 2, 0, 3)
    raise NotImplementedError(f"there is no formula for the layout {layout[:20]}")


def _heads_back(x: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    return x.transpose(1, 2).flatten(2) if layout == "BSH" else x.permute(2, 0, 1, 3).flatten(2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, pse: Tensor | None, mask: Tensor | None, scale: float, windows: tuple[int, int, int]
) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:  # several heads of the queries share one of the keys
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if pse is not None and pse.dim():
        scores = scores + pse
    dropped = _dropped(scores, mask, *windows)
    if dropped is not None:
        scores = scores.masked_fill(dropped, torch.finfo(scores.dtype).min / 2)
    return torch.softmax(scores, -1) @ v


def _dropped(scores: Tensor, mask: Tensor | None, sparse_mode: int, before: int, behind: int) -> Tensor | None:
    """Which scores do not count. Modes 2, 3 and 4 come with one compressed mask of 2048 x 2048 and mean: causal from the left upper
    corner, from the right lower corner, and a band around the latter."""
    rows, columns = scores.shape[-2:]
    row, column = torch.arange(rows, device=scores.device)[:, None], torch.arange(columns, device=scores.device)[None]
    if sparse_mode == 2:
        return column > row
    if sparse_mode == 3:
        return column > row + columns - rows
    if sparse_mode == 4:
        middle = row + columns - rows
        return (column > middle + behind) | (column < middle - before)
    if mask is None or not mask.dim():
        return None
    dropped = mask.bool()
    if sparse_mode == 0 and before < rows:
        dropped = dropped | (column < row - before)
    return dropped


def _gradient_of(formula: Formula, count: int) -> Formula:
    """The operator whose arguments are the gradient of the result of `formula`, `count` tensors it depends on, and its other arguments.
    It gives the gradients of those tensors."""

    def backward(grad: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            inputs = [value.detach().requires_grad_() for value in args[:count]]
            result = formula(*inputs, *args[count:], **kwargs)
            found = torch.autograd.grad(result, inputs, grad)
        return found[0] if count == 1 else found

    return backward


def rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight, from the kept reciprocal root."""
    axes = tuple(range(-gamma.dim(), 0))
    scaled = x * rstd
    weighted = dy * gamma
    dx = (weighted - scaled * (weighted * scaled).mean(axes, keepdim=True)) * rstd
    return dx, (dy * scaled).sum(tuple(range(x.dim() - gamma.dim())))


def linear_backward(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight."""
    return grad @ weight, grad.flatten(0, -2).t() @ input.flatten(0, -2)


def confusion_transpose_backward(grad: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """The way back of `confusion_transpose`; `shape` is that of its input."""
    back = [list(perm).index(n) for n in range(len(perm))]
    if transpose_first:
        return grad.reshape([shape[n] for n in perm]).permute(*back)
    return grad.permute(*back).reshape(*shape)


FORMULAS: dict[str, Formula] = {
    "npu_rms_norm": rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
    "npu_swiglu": swiglu,
    "npu_swiglu_backward": _gradient_of(swiglu, 1),
    "npu_fast_gelu": fast_gelu,
    "fast_gelu": fast_gelu,
    "npu_fast_gelu_backward": _gradient_of(fast_gelu, 1),
    "npu_rotary_mul": rotary_mul,
    "npu_rotary_mul_backward": _gradient_of(rotary_mul, 3),
    "npu_scaled_masked_softmax": scaled_masked_softmax,
    "npu_scaled_masked_softmax_backward": scaled_masked_softmax_backward,
    "npu_linear": linear,
    "npu_linear_backward": linear_backward,
    "npu_layer_norm_eval": layer_norm_eval,
    "npu_group_norm_silu": group_norm_silu,
    "npu_mish": mish,
    "npu_confusion_transpose": confusion_transpose,
    "npu_confusion_transpose_backward": confusion_transpose_backward,
    "npu_sort_v2": sort_v2,
    "npu_moe_gating_top_k_softmax": moe_gating_top_k_softmax,
    "npu_apply_adam": apply_adam,
    "npu_apply_adam_w": apply_adam_w,
    "npu_fusion_attention": fusion_attention,
}
"""By the last part of a name. Results that a formula does not give are not compared."""
