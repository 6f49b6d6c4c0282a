"""Mixture of experts: gates, and the way of tokens to their experts and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from msprobe_integrations.torch.op_tools.accuracy.references.formula import Formula, require


def _best(scores: Tensor, k: int) -> Tensor:
    """Places of the k largest; of equal ones the first."""
    return torch.sort(scores, stable=True, dim=-1, descending=True).indices[..., :k]


def _mark_finished_rows(experts: Tensor, finished: Tensor | None, count: int) -> Tensor:
    """A finished row has the number of experts for all of its experts."""
    return experts if finished is None else torch.where(finished.reshape(*experts.shape[:-1], 1), count, experts)


def moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(weights of the k best experts, their numbers, numbers of the rows column by column)."""
    weights = torch.softmax(x, -1)
    order = _best(weights, k)
    rows = math.prod(order.shape[:-1])
    numbers = torch.arange(rows * k, device=x.device).reshape(k, rows).t().reshape(order.shape)
    return weights.gather(-1, order), _mark_finished_rows(order, finished, x.shape[-1]).int(), numbers.int()


def moe_gating_top_k_softmax_v2(
    x: Tensor, *, k: int = 1, finished: Tensor | None = None, renorm: int | None = 0, output_softmax: bool | None = False
) -> tuple[Tensor, ...]:
    """(weights of the k best experts, their numbers, all weights). With `renorm` 1 the softmax is that of the k best. All weights only
    with `output_softmax`, without `renorm`."""
    require(renorm in (None, 0, 1), f"renorm {renorm} is not known to the formula")
    weights = torch.softmax(x, -1)
    order = _best(x if renorm else weights, k)
    best = torch.softmax(x.gather(-1, order), -1) if renorm else weights.gather(-1, order)
    results = (best, _mark_finished_rows(order, finished, x.shape[-1]).int())
    return (*results, weights) if output_softmax and not renorm else results


def moe_gating_top_k(
    x: Tensor, k: int, *, bias: Tensor | None = None, input_ids: Tensor | None = None, tid2eid: Tensor | None = None, k_group: int = 1,
    group_count: int = 1, group_select_mode: int = 0, renorm: int = 0, norm_type: int = 0, out_flag: bool = False,
    routed_scaling_factor: float = 1.0, eps: float = 1e-20,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(weights of the k best experts of the `k_group` best groups, their numbers, all weights when `out_flag` is set). Weights are a
    softmax (`norm_type` 0) or sigmoids, which are made to sum to 1; the bias only counts for the choice. A group is as good as its best
    expert (`group_select_mode` 0) or its two best."""
    require(input_ids is None and tid2eid is None, "arguments input_ids and tid2eid are not known to the formula of npu_moe_gating_top_k")
    require(renorm == 0, f"renorm {renorm} is not known to the formula")
    require(norm_type in (0, 1), f"norm_type {norm_type} is not known to the formula")
    require(group_select_mode in (0, 1), f"group_select_mode {group_select_mode} is not known to the formula")
    weights = torch.softmax(x, -1) if norm_type == 0 else torch.sigmoid(x)
    scores = weights if bias is None else weights + bias
    if group_count > 1:
        grouped = torch.unflatten(scores, -1, (group_count, -1))
        good = grouped.amax(-1) if group_select_mode == 0 else grouped.topk(2, -1).values.sum(-1)
        chosen = torch.zeros_like(good, dtype=torch.bool).scatter_(-1, _best(good, k_group), True)
        scores = grouped.masked_fill(~chosen[..., None], -math.inf).flatten(-2)
    order = _best(scores, k)
    best = weights.gather(-1, order)
    if norm_type == 1:
        best = best / (best.sum(-1, keepdim=True) + eps)
    results = (best * routed_scaling_factor, order.int())
    return (*results, weights) if out_flag else results


def moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """(tokens in the order of their experts, for each token and choice its place in that order). `num_out_tokens` cuts off the last."""
    require(not padded_mode, "argument padded_mode is not known to the formula of npu_moe_token_permute")
    order = torch.argsort(indices.flatten(), stable=True)
    kept = order[: num_out_tokens or None]
    return tokens[kept // _choices(indices)], torch.argsort(order).int()


def _choices(indices: Tensor) -> int:
    return 1 if indices.dim() == 1 else indices.shape[1]


def moe_token_permute_grad(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    """Gradient of the tokens: the sum over all places of each."""
    require(not padded_mode, "argument padded_mode is not known to the formula of npu_moe_token_permute_grad")
    del tokens
    return torch.unflatten(_gather_rows(grad_permuted_tokens, sorted_indices), 0, (-1, _choices(indices))).sum(1)


def _gather_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Rows by their places; zeros for what was cut off."""
    places = places.long()
    is_row = places < rows.shape[0]
    return (
        torch.where(is_row[:, None], rows[torch.where(is_row, places, 0)], 0)
        if rows.shape[0]
        else rows.new_zeros(len(places), *rows.shape[1:])
    )


def moe_token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """The sum over the choices of each token, weighted by `probs`."""
    require(not padded_mode, "argument padded_mode is not known to the formula of npu_moe_token_unpermute")
    del restore_shape
    choices = 1 if probs is None else probs.shape[1]
    found = torch.unflatten(_gather_rows(permuted_tokens, sorted_indices), 0, (-1, choices))
    return (found if probs is None else found * probs[..., None]).sum(1)


def moe_token_unpermute_grad(
    permuted_tokens: Tensor, grad_unpermuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None,
    padded_mode: bool = False, restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the permuted tokens and of `probs`."""
    inputs = [permuted_tokens.detach().requires_grad_(), *([] if probs is None else [probs.detach().requires_grad_()])]
    with torch.enable_grad():
        out = moe_token_unpermute(inputs[0], sorted_indices, inputs[1] if len(inputs) > 1 else None, padded_mode, restore_shape)
        found = torch.autograd.grad(out, inputs, grad_unpermuted_tokens)
    return found[0], found[1] if len(inputs) > 1 else None


def moe_token_permute_with_routing_map(
    tokens: Tensor, routing_map: Tensor, *, probs: Tensor | None = None, num_out_tokens: int | None = None, drop_and_pad: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(tokens expert by expert, their probabilities, for each token and choice its place). With `drop_and_pad` each expert takes the same
    number of tokens, and the third result are the tokens."""
    by_expert = routing_map.bool().t()
    if drop_and_pad:
        require(num_out_tokens is not None, "drop_and_pad without num_out_tokens")
        assert num_out_tokens is not None
        capacity = num_out_tokens // by_expert.shape[0]
        source = torch.sort(by_expert.int(), dim=-1, descending=True, stable=True).indices[:, :capacity]
        chosen = None if probs is None else probs.t().gather(1, source).flatten()
        return tokens[source.flatten()], chosen, source.flatten().int()
    experts, source = by_expert.nonzero(as_tuple=True)
    chosen = None if probs is None else probs[source, experts]
    return tokens[source], chosen, torch.argsort(source, stable=True).int()


def moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape: Sequence[int], *, probs: Tensor | None = None,
    routing_map: Tensor | None = None, drop_and_pad: bool = False,
) -> Tensor:  # fmt: skip
    """The way back of `moe_token_permute_with_routing_map`, weighted by `probs`."""
    places = sorted_indices.long()
    if drop_and_pad:
        if probs is not None:
            weights = probs.t().gather(1, places.view(probs.shape[1], -1)).flatten()
            permuted_tokens = permuted_tokens * weights[:, None]
        return permuted_tokens.new_zeros(list(restore_shape)).index_add(0, places, permuted_tokens)
    require(routing_map is not None, "routing_map is missing")
    assert routing_map is not None
    choices = permuted_tokens.shape[0] // routing_map.shape[0]
    require(bool((routing_map.bool().sum(1) == choices).all()), "tokens with different numbers of experts: the result is not defined")
    tokens = torch.unflatten(permuted_tokens[places], 0, (-1, choices))
    if probs is not None:
        tokens = tokens * probs[routing_map.bool()].view(-1, choices, 1)
    return tokens.sum(1)


FORMULAS: dict[str, Formula] = {
    "npu_moe_gating_top_k": moe_gating_top_k,
    "npu_moe_gating_top_k_softmax": moe_gating_top_k_softmax,
    "npu_moe_gating_top_k_softmax_v2": moe_gating_top_k_softmax_v2,
    "npu_moe_token_permute": moe_token_permute,
    "npu_moe_token_permute_grad": moe_token_permute_grad,
    "npu_moe_token_unpermute": moe_token_unpermute,
    "npu_moe_token_unpermute_grad": moe_token_unpermute_grad,
    "npu_moe_token_permute_with_routing_map": moe_token_permute_with_routing_map,
    "npu_moe_token_unpermute_with_routing_map": moe_token_unpermute_with_routing_map,
}
