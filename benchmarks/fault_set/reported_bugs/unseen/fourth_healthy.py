"""Pairs that differ in nothing but rounding, most of them in layouts, and single runs that are right; written down before the verdict
engine and the other lists were read. They were run once before anything was changed for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from reported_bugs.case import Healthy, Plant, every, in_model, nothing, when_ready
from reported_bugs.faults.in_data import before_step
from reported_bugs.faults.in_deepspeed import DDP_FP32, ZERO1_MICRO, ZERO3_MICRO
from reported_bugs.faults.watched import data, rate_of
from reported_bugs.run_megatron import of
from reported_bugs.training import Batch, Program, Setting
from reported_bugs.unseen.fourth_alone import AMP, BF16, DDP, FP16, FSDP, MOE, WATCHED
from reported_bugs.unseen.fourth_plants import BOTH, DRAW, EVERY, counted_tokens, drawn, some, with_dropout
from reported_bugs.unseen.fourth_ranks import ONE, TWO, context_parallel, tensor_parallel
from reported_bugs.unseen.second import named
from torch import Tensor
from torch.nn import functional as F

PERIOD, ADVANTAGE, TOP = DRAW.randint(12, 18), drawn(0.5, 1.5), DRAW.randint(30, 40)


def pair(name: str, setting: Setting, other: Setting, plant: Plant = nothing, levels: Any = BOTH, golden: Plant | None = None) -> Healthy:
    return Healthy(f"reported: {name}", setting, other, plant, some(levels), plant if golden is None else golden)


def mcore(name: str, form: str, other: str, levels: Any = BOTH, plant: Plant = nothing, golden: Plant = nothing) -> Healthy:
    return Healthy(f"reported: mcore: {name}", of(form), of(other), plant, some(levels), golden)


def alone(name: str, setting: Setting, plant: Plant = nothing, levels: Any = WATCHED) -> Healthy:
    return Healthy(f"reported: alone: {name}", setting, None, plant, some(levels))


def kept_whole(p: Program) -> None:
    """Weights stay whole behind the forward pass."""

    def wrap() -> None:
        from torch.distributed import fsdp

        own = fsdp.fully_shard
        fsdp.fully_shard = lambda module: own(module, reshard_after_forward=False)
        try:
            Program.wrap(p)
        finally:
            fsdp.fully_shard = own

    p.wrap = wrap  # type: ignore[method-assign]


def restarts(step: int) -> float:
    return 0.05 + 0.95 * (1 - (step % PERIOD) / PERIOD)


def to_zero(step: int) -> float:
    return max(0.0, 1 - step / 58)


def at_times_too_large(p: Program) -> None:
    """The loss scale grows until it overflows, and is halved."""
    p.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=6)


def policy_gradient(p: Program) -> None:
    """A loss of advantages with a mean of zero."""

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        chance = -F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=-100, reduction="none")
        advantage = torch.randn(len(labels), generator=torch.Generator().manual_seed(int(labels.sum()))) * ADVANTAGE
        return -((advantage - advantage.mean())[:, None] * torch.exp(chance - chance.detach())).sum()

    p.criterion = criterion  # type: ignore[method-assign]


def preference(p: Program) -> None:
    """A loss of pairs, which begins at log 2."""

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        each = -F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=-100, reduction="none").sum(1)
        half = len(each) // 2
        return -F.logsigmoid(0.1 * (each[:half] - each[half:])).sum() * 20

    p.criterion = criterion  # type: ignore[method-assign]


def two_players(p: Program) -> None:
    """A critic on the last hidden states pulls against the model, step by step."""
    own, count = p.criterion, [0]

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        count[0] += 1
        score = logits.float().mean((1, 2))
        return own(logits, labels) + (1 if count[0] % 2 else -1) * 5 * F.softplus(score).sum()

    p.criterion = criterion  # type: ignore[method-assign]


def idle_experts(model: Any) -> None:
    """Many experts, one for a token: most have nothing to do in a step."""
    for mixture in every(model, "Experts"):
        mixture.top = 1


def harder(step: int, rows: Batch) -> Batch:
    """Rare words come in slowly."""
    most = 60 + 3 * step
    keep = rows["labels"] < most
    return {**rows, "tokens": rows["tokens"].clamp(max=most), "labels": torch.where(keep, rows["labels"], -100)}


def batch_grows(p: Program) -> None:
    own = p.batches
    p.batches = lambda step: [{key: value[: 1 if step < TOP else 2] for key, value in b.items()} for b in own(step)]  # type: ignore[method-assign]


def decays_more(p: Program) -> None:
    for group in p.optimizer.param_groups:
        group["weight_decay"] *= 1.5


def frozen_embedding(model: Any) -> None:
    model.embedding.weight.requires_grad_(False)


MANY = replace(AMP, rows=2, changes=(("experts", 16),))
BF16_ONE, AMP_ONE = Setting(), Setting(dtype="amp")
MIXTRAL, QWEN2 = Setting("mixtral"), Setting("qwen2", dtype="amp")
FP32_LONG, CHECKPOINTED = replace(DDP_FP32, steps=24), Setting(dtype="amp", ranks=2, wrap="fsdp", changes=(("dropout", 0.1),))
TP, CP = tensor_parallel(), context_parallel()
CASES = (
    mcore(
        "sp 2 dp 2 with shards for one process, bf16", "--nmb 4 --bf16 --lr 1e-3", "--tp 2 --sp --dp 2 --nmb 2 --distopt --bf16 --lr 1e-3"
    ),
    mcore(
        "virtual stages for one process, bf16", "--layers 4 --nmb 4 --bf16 --lr 1e-3", "--layers 4 --pp 2 --vpp 2 --nmb 4 --bf16 --lr 1e-3"
    ),
    mcore("experts under sp for one process, bf16", "--experts 4 --untie --bf16", "--tp 2 --sp --ep 2 --experts 4 --untie --bf16"),
    mcore("all-gather for all-to-all, bf16", "--ep 2 --experts 4 --untie --bf16", "--ep 2 --experts 4 --untie --allgather --bf16", EVERY),
    mcore("overlaps, bf16", "--dp 2 --bf16 --lr 1e-3", "--dp 2 --distopt --overlap-param --bf16 --lr 1e-3", EVERY),
    mcore("tp 2 for one process, fp16", "--fp16 --lr 1e-3", "--tp 2 --fp16 --lr 1e-3", EVERY),
    mcore("stages and shards, bf16", "--pp 2 --nmb 4 --bf16 --clip 0.1 --lr 1e-3", "--tp 2 --nmb 4 --bf16 --clip 0.1 --lr 1e-3"),
    mcore("tokens that count, a repeat", "--dp 2 --bf16", "--dp 2 --bf16", EVERY, counted_tokens(False), counted_tokens(False)),
    mcore("tp 2 for one process, monitors, bf16", "--bf16 --lr 1e-3", "--tp 2 --bf16 --lr 1e-3", ("monitor",)),
    mcore("pp 2 for one process, monitors, bf16", "--nmb 4 --bf16 --lr 1e-3", "--pp 2 --nmb 4 --bf16 --lr 1e-3", ("monitor",)),
    mcore("ep 2 for one process, monitors", "--experts 4 --untie --nmb 4", "--ep 2 --experts 4 --untie --nmb 2", ("monitor",)),
    Healthy("reported: alone: mcore: experts, two data ranks", of("--dp 2 --experts 8 --untie --bf16"), None, levels=EVERY),
    Healthy("reported: alone: mcore: fp16 with overflows", of("--tp 2 --fp16 --lr 1e-3"), None, levels=EVERY),
    Healthy("reported: alone: mcore: four ranks", of("--tp 2 --pp 2 --nmb 4 --bf16"), None, levels=EVERY),
    Healthy("reported: alone: mcore: computed again", of("--dp 2 --recompute --bf16"), None, with_dropout, EVERY),
    pair("tp 2 for one process, bf16", ONE, TWO, TP, EVERY),
    pair("tp 2 for one process, amp, two micro batches", replace(ONE, dtype="amp"), replace(TWO, dtype="amp", micro=2), TP),
    pair("cp 2 for one process, bf16", BF16_ONE, replace(BF16_ONE, ranks=2, wrap="ddp"), CP, EVERY),
    pair("cp 2 for one process, amp", AMP_ONE, replace(AMP_ONE, ranks=2, wrap="ddp"), CP),
    pair(
        "weights kept whole, bf16",
        replace(BF16_ONE, ranks=2, wrap="fsdp"),
        replace(BF16_ONE, ranks=2, wrap="fsdp", micro=1),
        kept_whole,
        EVERY,
        named(lambda _p: None, "plain"),
    ),
    pair("zero 1 for fsdp, fp32", replace(DDP_FP32, wrap="fsdp"), replace(DDP_FP32, wrap="deepspeed1"), levels=EVERY),
    pair("zero 3 for ddp, monitors", FP32_LONG, replace(FP32_LONG, wrap="deepspeed3"), levels=("monitor",)),
    pair("zero 3 for zero 1, small buckets", ZERO1_MICRO, replace(ZERO3_MICRO, form="reduce_bucket_size=2048"), levels=("L0", "monitor")),
    pair("mixtral, fsdp for one process", MIXTRAL, replace(MIXTRAL, ranks=2, wrap="fsdp")),
    pair("qwen2, ddp for four micro batches", replace(QWEN2, micro=4), replace(QWEN2, ranks=2, wrap="ddp"), levels=EVERY),
    pair(
        "computed again, dropout, fsdp",
        CHECKPOINTED,
        replace(CHECKPOINTED, changes=(("dropout", 0.1), ("checkpoint", "new"))),
        levels=EVERY,
    ),
    alone("restarts, fsdp", replace(FSDP, lr=2e-3), rate_of(restarts)),
    alone("rate falls to zero", AMP, rate_of(to_zero)),
    alone("loss scale too large at times", FP16, when_ready(at_times_too_large), ("watch", "monitor", "nan")),
    alone("policy gradient", AMP, when_ready(policy_gradient)),
    alone("preferences", replace(DDP, rows=8), when_ready(preference)),
    alone("two players", AMP, when_ready(two_players)),
    alone("many idle experts", MANY, in_model(idle_experts), ("watch", "monitor", "nan")),
    alone("curriculum of words, experts", MOE, data(harder)),
    alone("batch grows, ddp", DDP, when_ready(batch_grows)),
    alone("more decay on the way", replace(AMP, decay=0.2), before_step(TOP, decays_more)),
    alone("frozen embedding", replace(BF16, lr=3e-3), in_model(frozen_embedding), ("watch",)),
)
