"""Pairs that differ in nothing but rounding, most of them in layouts, and single runs that are right; written down before the verdict
engine and the other lists were read. They were run once before anything was changed for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from reported_bugs import models
from reported_bugs.case import Healthy, Plant, every, nothing, other_function, when_ready
from reported_bugs.faults.in_deepspeed import DDP_FP32, ZERO1_MICRO, ZERO2_MICRO, ZERO3_FP32, ZERO3_MICRO
from reported_bugs.healthy.pairs import not_balanced
from reported_bugs.run_megatron import of
from reported_bugs.training import Program, Setting
from reported_bugs.unseen.second import averaged, named
from reported_bugs.unseen.third_in_data import answers, fused_loss
from reported_bugs.unseen.third_in_models import (
    AMP,
    BF16,
    BOTH,
    DRAW,
    FP32,
    MOE,
    PACKED,
    QUERY,
    biased_experts,
    edited,
    loaded_norms,
    norm_kernel,
)
from reported_bugs.unseen.third_in_updates import DDP, DDP_AMP, momentum, watched
from torch import Tensor, nn
from torch.nn import functional as F

EVERY = ("mix", "L0", "monitor")
SCALE = 2.0 ** DRAW.randint(7, 14)


def grouped(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, _fused: bool) -> Tensor:
    """Keys stay as many as their groups."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)


def by_groups(program: Program) -> None:
    other_function("attend", grouped)(program)
    other_function("repeated", lambda x, _times: x)(program)


def sorted_experts(model: Any) -> None:
    """Tokens are sorted by expert, and put back."""
    for mixture in every(model, "Experts"):

        def mix(flat: Tensor, weights: Tensor, experts: Tensor, mixture: Any = mixture) -> Tensor:
            order = experts.flatten().argsort(stable=True)
            counts = torch.bincount(experts.flatten(), minlength=len(mixture.experts)).tolist()
            given = flat[order // mixture.top].split(counts)
            out = torch.cat([expert(part) for expert, part in zip(mixture.experts, given)])
            back = out[order.argsort()].view(len(flat), mixture.top, -1)
            return (back * weights[..., None].to(flat.dtype)).sum(1)

        mixture.mix = mix


def table_of_angles(model: Any) -> None:
    """Cosines and sines are looked up in a table."""
    inverse = model.rotary.inverse.float()
    angles = torch.arange(4 * models.LENGTH)[:, None].float() * inverse
    angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos(), angles.sin()
    model.rotary.forward = lambda x, places: (cos[places][:, None].to(x.dtype), sin[places][:, None].to(x.dtype))


def static_graph(program: Program) -> None:
    program.ddp_arguments = lambda: {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.1}  # type: ignore[method-assign]


def averaged_by_list(program: Program) -> None:
    averages = [p.detach().clone() for p in program.model.parameters()]
    own = program.update

    def update() -> None:
        own()
        with torch.no_grad():
            torch._foreach_mul_(averages, 0.99)
            torch._foreach_add_(averages, list(program.model.parameters()), alpha=1 - 0.99)

    program.update = update  # type: ignore[method-assign]


def scaled_by(scale: float) -> Plant:
    return named(when_ready(lambda p: setattr(p, "scaler", torch.amp.GradScaler("cpu", init_scale=scale))), "scaled")


def branches_begin_at_zero(model: Any) -> None:
    for layer in model.layers:
        nn.init.zeros_(layer.attention.o.weight)
        nn.init.zeros_(layer.mlp.down.weight)


def cut_in_sequences(program: Program) -> None:
    """The loss is summed up sequence by sequence."""
    own = program.criterion
    program.criterion = lambda logits, labels: sum(own(one, label) for one, label in zip(logits, labels))  # type: ignore[method-assign]


def pair(name: str, setting: Setting, other: Setting, plant: Plant = nothing, levels: Any = BOTH, golden: Plant | None = None) -> Healthy:
    return Healthy(f"strangers: {name}", setting, other, plant, levels, plant if golden is None else golden)


PLAIN = named(lambda _p: None, "plain")
QWEN3, LLAMA = Setting("qwen3"), Setting("llama")
BALANCED = named(lambda p: p.change_model.append(not_balanced), "not balanced")
DROPPED = replace(DDP_AMP, changes=(("dropout", 0.1),))
FP16 = Setting(dtype="fp16", micro=2)
ONLY = ("monitor",)

CASES = (
    # other layouts
    pair("qwen3, ddp for one process", QWEN3, replace(QWEN3, ranks=2, wrap="ddp"), levels=EVERY),
    pair("zero 2 for zero 1, two micro batches", ZERO1_MICRO, ZERO2_MICRO, levels=EVERY),
    pair("zero 1 for zero 3, two micro batches", ZERO3_MICRO, ZERO1_MICRO, levels=("L0", "monitor")),
    pair("zero 3 for ddp, fp32", DDP_FP32, ZERO3_FP32, levels=("L0", "monitor")),
    pair("fsdp for ddp, dropout, amp", DROPPED, replace(DROPPED, wrap="fsdp"), levels=EVERY),
    pair("fsdp for one process, experts", MOE, replace(MOE, ranks=2, wrap="fsdp"), BALANCED),
    pair("fsdp for one process, packed, two micro batches", PACKED, replace(PACKED, micro=2, ranks=2, wrap="fsdp")),
    pair("ddp for one process, expert bias", MOE, replace(MOE, ranks=2, wrap="ddp"), BALANCED),
    pair("ddp, buckets are gradients", replace(DDP, micro=2), replace(DDP, micro=2), static_graph, EVERY, PLAIN),
    pair(
        "four micro batches for one, amp, norm of queries", replace(QUERY, dtype="amp"), replace(QUERY, dtype="amp", micro=4), levels=EVERY
    ),
    pair("four micro batches for one, answers", BF16, replace(BF16, micro=4), answers(0)),
    pair("mcore: tp 2 pp 2 for one process, bf16", of("--nmb 4 --bf16 --lr 1e-3"), of("--tp 2 --pp 2 --nmb 4 --bf16 --lr 1e-3")),
    pair("mcore: ep 2 for one process, bf16", of("--experts 4 --untie --nmb 4 --bf16"), of("--ep 2 --experts 4 --untie --nmb 2 --bf16")),
    pair("mcore: distributed optimizer for one process, bf16", of("--nmb 4 --bf16"), of("--dp 2 --nmb 2 --distopt --bf16")),
    pair(
        "mcore: pp 2 for one process, experts, bf16",
        of("--experts 4 --untie --nmb 4 --bf16"),
        of("--pp 2 --experts 4 --untie --nmb 4 --bf16"),
    ),
    # other ways to the same numbers
    pair("groups of keys kept", BF16, BF16, by_groups, ("mix", "L1", "L0"), PLAIN),
    pair("groups of keys kept, amp", AMP, AMP, by_groups, EVERY, PLAIN),
    pair("tokens sorted by expert", MOE, MOE, edited("sorted", sorted_experts), ("mix", "L1", "L0"), PLAIN),
    pair(
        "tokens sorted by expert, fp32", replace(MOE, dtype="fp32"), replace(MOE, dtype="fp32"), edited("s", sorted_experts), EVERY, PLAIN
    ),
    pair("kernel of norms", BF16, BF16, edited("kernel", norm_kernel()), EVERY, PLAIN),
    pair("kernel of norms, fp32", FP32, FP32, edited("kernel", norm_kernel()), BOTH, PLAIN),
    pair("fused loss", BF16, BF16, fused_loss(False), EVERY, PLAIN),
    pair("loss of each sequence", AMP, AMP, when_ready(cut_in_sequences), BOTH, PLAIN),
    pair("angles from a table", PACKED, PACKED, edited("table", table_of_angles), BOTH, PLAIN),
    pair("loss scale of another power, two micro batches", FP16, FP16, scaled_by(SCALE), EVERY, PLAIN),
    pair("average by lists", BF16, BF16, when_ready(averaged_by_list), ("mix",), averaged(0.99)),
    pair("expert bias, a repeat", MOE, MOE, biased_experts("biased"), EVERY),
    pair("weights of norms loaded, eager for fused", replace(BF16, changes=(("fused", False),)), BF16, edited("loaded", loaded_norms(""))),
    # monitors and single runs
    pair("monitors: ddp for fsdp, bf16", watched(DDP), watched(replace(DDP, wrap="fsdp")), levels=ONLY),
    pair("monitors: zero 2 for zero 1", watched(ZERO1_MICRO), watched(ZERO2_MICRO), levels=ONLY),
    pair("monitors: llama, four micro batches for one", watched(LLAMA), watched(LLAMA, micro=4), levels=ONLY),
    pair("monitors: momentum by list", watched(FP32), watched(FP32), momentum(True), ("monitor", "watch")),
    pair("monitors: experts sorted", watched(MOE), watched(MOE), edited("sorted", sorted_experts), ONLY, PLAIN),
    pair("monitors: kernel of norms, ddp for one process", watched(AMP), watched(DDP_AMP), edited("kernel", norm_kernel()), ONLY, PLAIN),
    Healthy("one run: branches begin at zero", watched(AMP), None, edited("zero", branches_begin_at_zero), ("monitor", "watch")),
    Healthy("one run: branches begin at zero, dumped", BF16, None, edited("zero", branches_begin_at_zero), BOTH),
    Healthy(
        "one run: expert bias, ddp",
        watched(replace(MOE, dtype="amp", ranks=2, wrap="ddp")),
        None,
        biased_experts("b"),
        ("monitor", "watch"),
    ),
    Healthy("one run: packed, fsdp", replace(PACKED, ranks=2, wrap="fsdp"), None, levels=BOTH),
)
