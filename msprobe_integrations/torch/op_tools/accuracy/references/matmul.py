"""Linear layers and products of matrices, one by one and in groups (of experts)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from msprobe_integrations.torch.op_tools.accuracy.references.activations import fast_gelu
from msprobe_integrations.torch.op_tools.accuracy.references.formula import Formula, ends_of, is_given, require

Groups = Sequence[int] | Tensor
_ROWS, _INNER = 0, 2
"""``group_type``: which axis of ``[rows, inner] @ [inner, columns]`` is cut into groups; -1 and None: neither."""
_ENDS, _COUNTS = 0, 1
"""``group_list_type``."""
_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda x: x,
    1: functional.relu,
    2: lambda x: functional.gelu(x, approximate="tanh"),
    4: fast_gelu,
    5: functional.silu,
}
"""``act_type``."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``."""
    return functional.linear(input, weight, bias)


def linear_backward(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight."""
    return grad @ weight, grad.flatten(0, -2).t() @ input.flatten(0, -2)


def matmul_backward(grad: Tensor, self: Tensor, other: Tensor, mask: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``torch.matmul``, of those of its arguments that `mask` asks for."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (self, other)]
        gradients = torch.autograd.grad(torch.matmul(*inputs), inputs, grad)
    return gradients[0] if mask[0] else None, gradients[1] if mask[1] else None


def _lengths(groups: Groups, kind: int | None) -> list[int]:
    require(kind in (None, _ENDS, _COUNTS), f"group_list_type {kind} is not known to the formula")
    numbers = ends_of(groups)
    return numbers if kind == _COUNTS else [end - begin for begin, end in zip([0, *numbers], numbers)]


def _split_groups(x: Tensor, groups: Groups, kind: int | None, dim: int = 0) -> list[Tensor]:
    lengths = _lengths(groups, kind)
    require(sum(lengths) == x.shape[dim], "rows that are in no group: their result is not defined")
    return list(x.split(lengths, dim))


def grouped_matmul(
    x: Sequence[Tensor], weight: Sequence[Tensor], *, bias: Sequence[Tensor] | None = None, scale: Sequence[Tensor] | None = None,
    offset: Sequence[Tensor] | None = None, antiquant_scale: Sequence[Tensor] | None = None,
    antiquant_offset: Sequence[Tensor] | None = None, per_token_scale: Sequence[Tensor] | None = None,
    group_list: Groups | None = None, activation_input: Sequence[Tensor] | None = None,
    activation_quant_scale: Sequence[Tensor] | None = None, activation_quant_offset: Sequence[Tensor] | None = None,
    split_item: int | None = 0, group_type: int | None = None, group_list_type: int | None = 0, act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None, output_dtype: Any = None, x_dtype: Any = None, weight_dtype: Any = None,
    scale_dtype: Any = None, per_token_scale_dtype: Any = None,
) -> list[Tensor]:  # fmt: skip
    """Products ``x_i @ weight_i + bias_i``: of lists of equal length, or of one x (and one weight) cut into groups. One tensor when
    `split_item` is 2 or 3, else one per weight.

    Raises:
        NotChecked: quantized products, or what is not defined.
    """
    del tuning_config, output_dtype, x_dtype, weight_dtype, scale_dtype, per_token_scale_dtype
    quantized = {
        "scale": scale, "offset": offset, "antiquant_scale": antiquant_scale, "antiquant_offset": antiquant_offset,
        "per_token_scale": per_token_scale, "activation_input": activation_input, "activation_quant_scale": activation_quant_scale,
        "activation_quant_offset": activation_quant_offset,
    }  # fmt: skip
    for name, value in quantized.items():
        require(not is_given(value), f"argument {name} (a quantized product) is not known to the formula of npu_grouped_matmul")
    require(all(t.is_floating_point() for t in (*x, *weight)), "quantized products have no formula")
    require((act_type or 0) in _ACTIVATIONS, f"act_type {act_type} is not known to the formula")
    require(group_type in (None, -1, _ROWS, _INNER), f"group_type {group_type} is not known to the formula")
    single = (split_item or 0) in (2, 3)
    if group_type == _INNER:
        require(len(x) == len(weight) == 1 and group_list is not None, "groups of the inner axis are those of one x and one weight")
        assert group_list is not None
        pairs = list(zip(_split_groups(x[0], group_list, group_list_type, 1), _split_groups(weight[0], group_list, group_list_type)))
    else:
        weights = list(weight[0].unbind()) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
        parts = list(x)
        if len(parts) == 1 and len(weights) > 1:
            require(group_list is not None, "one x for several weights, without group_list")
            assert group_list is not None
            parts = _split_groups(parts[0], group_list, group_list_type)
        require(len(parts) == len(weights), f"{len(parts)} groups for {len(weights)} weights")
        pairs = list(zip(parts, weights))
    biases = _biases(bias, len(pairs))
    activate = _ACTIVATIONS[act_type or 0]
    products = [activate(a @ b if c is None else a @ b + c) for (a, b), c in zip(pairs, biases)]
    if not single:
        return products
    return [torch.stack(products)] if group_type == _INNER else [torch.cat(products)]


def _biases(bias: Sequence[Tensor] | None, count: int) -> list[Tensor | None]:
    if bias is None or not len(bias):
        return [None] * count
    rows = list(bias[0].unbind()) if len(bias) == 1 and bias[0].dim() == 2 else list(bias)
    require(len(rows) == count, f"{len(rows)} biases for {count} products")
    return [*rows]


def _mindspeed_gmm(
    tensors: Sequence[Tensor | None], bias: Tensor | None, group_list: Groups | None, group_type: int | None, kind: int
) -> Tensor:
    x, weight = (t for t in tensors[-2:] if t is not None)  # the operator behind the function has the weight before its view in front
    require(group_type == _ROWS, f"group_type {group_type} is not known to the formula")
    return grouped_matmul(
        [x], [weight], bias=None if bias is None else [bias], group_list=group_list, group_list_type=kind, group_type=_ROWS, split_item=3
    )[0]


def _append_named_tensors(tensors: Sequence[Tensor | None], x: Tensor | None, weight: Tensor | None) -> list[Tensor | None]:
    return [*tensors, *(t for t in (x, weight) if t is not None)]


def mindspeed_gmm(
    *tensors: Tensor | None, x: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None,
    group_list: Groups | None = None, group_type: int = 0, gemm_fusion: bool = False, original_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rows of x in groups, each by its weight; `group_list` has the ends of the groups. With `gemm_fusion` the weight's gradient goes to
    another tensor, and is not compared."""
    del gemm_fusion, original_weight
    return _mindspeed_gmm(_append_named_tensors(tensors, x, weight), bias, group_list, group_type, _ENDS)


def mindspeed_gmm_v2(
    *tensors: Tensor | None, x: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None,
    group_list: Groups | None = None, group_type: int = 0, gemm_fusion: bool = False, original_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`mindspeed_gmm` whose `group_list` has the rows of each group."""
    del gemm_fusion, original_weight
    return _mindspeed_gmm(_append_named_tensors(tensors, x, weight), bias, group_list, group_type, _COUNTS)


def grouped_matmul_add_(
    self: Tensor, x: Tensor, weight: Tensor, group_list: Groups, *, transpose_x: bool = True, transpose_weight: bool = False,
    group_type: int = 2, group_list_type: int | None = 0,
) -> Tensor:  # fmt: skip
    """``x.T @ weight`` of each group of rows is added to `self`."""
    require(transpose_x and not transpose_weight and group_type == _INNER, "only x.T @ weight in groups of rows has a formula")
    pairs = zip(_split_groups(x, group_list, group_list_type), _split_groups(weight, group_list, group_list_type))
    return self.add_(torch.stack([a.t() @ b for a, b in pairs]).view(self.shape))


def groupmatmul_add_fp32(x: Tensor, dy: Tensor, grouplist: Groups, grad: Tensor) -> None:
    """``x.T @ dy`` of each group of rows is added to `grad`; `grouplist` has the ends."""
    grouped_matmul_add_(grad, x, dy, grouplist)


def matmul_add_fp32(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """``grad_output.T @ total_input`` is added to `grad`."""
    if total_input.numel() and grad_output.numel():
        grad.add_(grad_output.t() @ total_input)


FORMULAS: dict[str, Formula] = {
    "npu_linear": linear,
    "npu_linear_backward": linear_backward,
    "matmul_backward": matmul_backward,
    "npu_grouped_matmul": grouped_matmul,
    "npu_grouped_matmul_add_": grouped_matmul_add_,
    "MindSpeed.npu_gmm": mindspeed_gmm,
    "MindSpeed.npu_gmm_v2": mindspeed_gmm_v2,
    "MindSpeed.npu_groupmatmul_add_fp32": groupmatmul_add_fp32,
    "MindSpeed.npu_matmul_add_fp32": matmul_add_fp32,
}
