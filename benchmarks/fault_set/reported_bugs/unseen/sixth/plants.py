"""Bugs of the sixth set, written down from reports before the verdict engine was read."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.case import Plant, every
from reported_bugs.training import Batch, Program
from reported_bugs.unseen.second import named
from reported_bugs.unseen.sixth.parts import InForward
from torch import Tensor

DRAW = random.Random(90217)


def some(levels: tuple[str, ...], count: int = 2) -> tuple[str, ...]:
    return tuple(sorted(DRAW.sample(levels, min(count, len(levels))), key=levels.index))


def mixer(p: Any) -> Any:
    return p.decoder.layers["0"].attention


# ---- the model ------------------------------------------------------------------------------------------------------------------


def state_of_other_documents(p: Any) -> None:
    """The kernel is not told where documents begin."""
    mixer(p).joined = lambda documents: torch.ones_like(documents[:, :, None] == documents[:, None])


def window_over_documents(p: Any) -> None:
    mixer(p).same = lambda documents, back: torch.ones_like(documents, dtype=torch.bool)


def decays_in_bf16(p: Any) -> None:
    """Sums of many small decays are made in the type of the weights."""
    mine = mixer(p)
    own = mine.left

    def left(logs: Tensor, documents: Tensor) -> Tensor:
        found: Tensor = own(logs.bfloat16(), documents)
        return found.float()

    mine.left = left


def best_of_a_group(p: Any) -> None:
    p.experts().of_groups = lambda wanted: wanted.unflatten(-1, (4, -1)).amax(-1)


def scale_without_stretch(model: Any) -> None:
    for attention in every(model, "DeepseekV3Attention"):
        attention.scaling = attention.qk_head_dim**-0.5


def halves_for_turns(model: Any) -> None:
    def gate(experts: Any, both: Tensor) -> Tensor:
        first, second = both.chunk(2, -1)
        first, second = first.clamp(max=experts.limit), second.clamp(-experts.limit, experts.limit)
        return (second + 1) * first * torch.sigmoid(first * experts.alpha)

    experts = every(model, "GptOssExperts")[-1]
    experts._apply_gate = lambda both: gate(experts, both)


def pictures_in_another_order(p: Any) -> None:
    """They are sorted by their size, rows are not."""
    own = p.inputs

    def inputs(batch: Batch) -> dict[str, Any]:
        found = own(batch)
        order = found["pixel_values"].float().square().mean((1, 2, 3)).argsort()
        return {**found, "pixel_values": found["pixel_values"][order]}

    p.inputs = inputs


def scale_of_the_input(p: Any) -> None:
    """Going back, a weight of eight bits is multiplied by the scale of the input."""
    p.decoder.layers["0"].mlp.down.wrong = True


# ---- the loss -------------------------------------------------------------------------------------------------------------------


def gradient_of_the_first_token(_p: Program) -> None:
    InForward.of_token = staticmethod(lambda grad: grad[grad.nonzero()[0]].expand_as(grad))  # type: ignore[method-assign]


def counted_over_two_windows(p: Program) -> None:
    """Tokens are those of all rows that were generated, of which two updates are made."""
    own = p.tokens
    p.tokens = lambda micros: own([*micros, *p.batches(len(p.losses) + 1)])  # type: ignore[method-assign]


def last_micro_batch_dropped(p: Program) -> None:
    own = p.batches
    p.batches = lambda step: own(step)[:-1]  # type: ignore[method-assign]


# ---- updates --------------------------------------------------------------------------------------------------------------------


def mean_for_iterate(p: Any) -> None:
    """The optimizer was left in the mode of an evaluation: gradients are taken at the mean."""
    p.optimizer.between = 1.0


def largest_of_the_block_before(p: Any) -> None:
    own = p.optimizer.largest
    p.optimizer.largest_of = lambda blocks, written: own(blocks) if written else own(blocks).roll(1, 0)


def bias_the_other_way(p: Any) -> None:
    p.bias_rate = -p.bias_rate


# ---- ranks ----------------------------------------------------------------------------------------------------------------------


def not_reduced_apart(p: Any) -> None:
    p.reduce_apart = lambda weight: None


def factor_of_one(p: Any) -> None:
    """Experts are divided by the number of ranks that share them, which was taken to be one."""
    if p.setting.wrap == "fsdp":
        p.experts().set_force_sum_reduction_for_comms(True)
        p.experts().set_gradient_divide_factor(1.0)


def copies_not_summed(p: Any) -> None:
    p.sum_of_copies = lambda copy: None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        whole = grad.contiguous().clone()
        dist.all_reduce(whole)
        return whole


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        whole = x.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def parts_of_experts(weights_summed: bool = True) -> Plant:
    """Each rank has a half of the inside of every expert; `weights_summed`: gradients of the weights that a router gives, of which each
    rank knows a part."""

    def cut(model: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        if dist.get_world_size() == 1:
            return
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        experts = every(model, "Experts")[0]
        gate, value = experts.up.data.chunk(2, -1)
        halves = [torch.cat([a, b], -1) for a, b in zip(gate.chunk(2, -1), value.chunk(2, -1))]
        experts.up = torch.nn.Parameter(distribute_tensor(torch.cat(halves, -1), mesh, [Shard(2)]))
        experts.down = torch.nn.Parameter(distribute_tensor(experts.down.data, mesh, [Shard(1)]))
        experts.matrices = lambda: (experts.up.to_local(), experts.down.to_local())
        experts.entered = lambda x, weights: (_Enter.apply(x), _Enter.apply(weights) if weights_summed else weights)
        experts.summed = _Sum.apply

    def plant(p: Any) -> None:
        if p.setting.ranks > 1:
            p.batches = lambda step: [p.rows_of(step)]
            p.tokens = lambda micros: torch.stack([(b["labels"] != -100).sum() for b in micros]).sum()
            p.change_model.append(cut)

    return named(plant, f"parts of experts {weights_summed}")


# ---- megatron-core --------------------------------------------------------------------------------------------------------------


def z_loss_of_each_rank(chunks: list[Any]) -> None:
    """It is not divided by the ranks that a sequence is cut over."""
    if dist.get_world_size() > 1:
        for chunk in chunks:
            for router in every(chunk, "TopKRouter"):
                router.config.moe_z_loss_coeff *= 2
                break
