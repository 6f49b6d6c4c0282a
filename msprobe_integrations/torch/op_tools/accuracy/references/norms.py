"""Norms: by their definitions in the documentation of torch_npu; statistics that the backward reads are given where they are results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from msprobe_integrations.torch.op_tools.accuracy.references.formula import Formula, require


def _axes(weight: Tensor) -> tuple[int, ...]:
    """The last axes, those of the weight."""
    return tuple(range(-weight.dim(), 0))


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(y, reciprocal root of the mean square over the axes of `gamma`)."""
    rstd = torch.rsqrt(x.square().mean(_axes(gamma), keepdim=True) + epsilon)
    return x * rstd * gamma, rstd


def rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight, from the kept reciprocal root."""
    scaled = x * rstd
    weighted = dy * gamma
    dx = (weighted - scaled * (weighted * scaled).mean(_axes(gamma), keepdim=True)) * rstd
    return dx, (dy * scaled).sum(tuple(range(x.dim() - gamma.dim())))


def gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`rms_norm` whose weight is 1 + `gamma`."""
    return rms_norm(x, gamma + 1, epsilon)


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """(y, reciprocal root, sum) of `rms_norm` of the sum."""
    x = x1 + x2
    y, rstd = rms_norm(x, gamma, epsilon)
    return y, rstd, x


def add_rms_norm_cast(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`add_rms_norm` with y twice: in float32, and in the type of the inputs."""
    y, rstd, x = add_rms_norm(x1, x2, gamma, epsilon)
    return y, y, rstd, x


def add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """The reciprocal root of `add_rms_norm`; y is written into `x1`, the sum into `x2`."""
    y, rstd, x = add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(x)
    return rstd


def _normalise_values(x: Tensor, axes: tuple[int, ...], epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x with mean 0 and variance 1, mean, reciprocal standard deviation)."""
    mean = x.mean(axes, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(axes, keepdim=True) + epsilon)
    return (x - mean) * rstd, mean, rstd


def deep_norm(
    x: Tensor, gx: Tensor, beta: Tensor, gamma: Tensor, alpha: float = 0.3, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, reciprocal standard deviation, y) of the layer norm of ``alpha * x + gx``. Only y has a gradient."""
    scaled, mean, rstd = _normalise_values(alpha * x + gx, _axes(gamma), epsilon)
    return mean.detach(), rstd.detach(), scaled * gamma + beta


def deep_norm_backward(
    dy: Tensor, x: Tensor, gx: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, alpha: float = 0.3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gx, beta and gamma, from the kept mean and reciprocal standard deviation."""
    axes, rows = _axes(gamma), tuple(range(x.dim() - gamma.dim()))
    scaled = (alpha * x + gx - mean) * rstd
    weighted = dy * gamma
    dgx = (weighted - weighted.mean(axes, keepdim=True) - scaled * (weighted * scaled).mean(axes, keepdim=True)) * rstd
    return alpha * dgx, dgx, dy.sum(rows), (dy * scaled).sum(rows)


def add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, additional_output: bool = False
) -> tuple[Tensor | None, ...]:
    """(y, mean, reciprocal standard deviation, sum) of the layer norm of the sum; the sum only with `additional_output`."""
    x = x1 + x2
    scaled, mean, rstd = _normalise_values(x, _axes(gamma), epsilon)
    return scaled * gamma + beta, mean, rstd, x if additional_output else None


def layer_norm_eval(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return torch.nn.functional.layer_norm(input, list(normalized_shape), weight, bias, eps)


def _group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    inner = math.prod(x.shape[2:])
    y, mean, rstd = torch.ops.aten.native_group_norm(x, weight, bias, x.shape[0], x.shape[1], inner, groups, eps)
    return y, mean, rstd


def group_norm_silu(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(SiLU of the group norm, mean, reciprocal standard deviation)."""
    y, mean, rstd = _group_norm(input, group, weight, bias, eps)
    return torch.nn.functional.silu(y), mean, rstd


def group_norm_swish(
    input: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float | None = 1e-5, swish_scale: float | None = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(y * sigmoid(swish_scale * y) of the group norm y, mean, reciprocal standard deviation)."""
    y, mean, rstd = _group_norm(input, num_groups, weight, bias, 1e-5 if eps is None else eps)
    return y * torch.sigmoid((1.0 if swish_scale is None else swish_scale) * y), mean, rstd


def _dropout_add(x0: Tensor, residual: Tensor | None, dropout_p: float, rowscale: Tensor | None, layerscale: Tensor | None) -> Tensor:
    require(dropout_p == 0, "dropout_p above 0 draws random numbers")
    x = x0 if rowscale is None else x0 * rowscale[..., None]
    x = x if layerscale is None else x * layerscale
    return x if residual is None else x + residual


def _results(y: Tensor, x: Tensor, prenorm: bool) -> Tensor | tuple[Tensor, Tensor]:
    return (y, x) if prenorm else y


def dropout_add_layer_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = None, layerscale: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Layer norm of ``x0 * rowscale * layerscale + residual``; with `prenorm` this sum too. Without dropout, whose mask (of ones) is not
    compared."""
    del residual_in_fp32, return_dropout_mask
    x = _dropout_add(x0, residual, dropout_p, rowscale, layerscale)
    y = _normalise_values(x, (-1,), epsilon)[0] * weight
    return _results(y if bias is None else y + bias, x, prenorm)


def dropout_add_rms_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = None, layerscale: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`dropout_add_layer_norm` with the RMS norm."""
    del residual_in_fp32, return_dropout_mask
    x = _dropout_add(x0, residual, dropout_p, rowscale, layerscale)
    y = rms_norm(x, weight, epsilon)[0]
    return _results(y if bias is None else y + bias, x, prenorm)


FORMULAS: dict[str, Formula] = {
    "npu_rms_norm": rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
    "npu_gemma_rms_norm": gemma_rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_add_rms_norm_cast": add_rms_norm_cast,
    "npu_add_rms_norm_v2": add_rms_norm_v2,
    "npu_deep_norm": deep_norm,
    "npu_deep_norm_backward": deep_norm_backward,
    "npu_add_layer_norm": add_layer_norm,
    "npu_layer_norm_eval": layer_norm_eval,
    "npu_group_norm_silu": group_norm_silu,
    "npu_group_norm_swish": group_norm_swish,
    "MindSpeed.npu_dropout_add_layer_norm": dropout_add_layer_norm,
    "MindSpeed.npu_dropout_add_rms_norm": dropout_add_rms_norm,
}
