"""Single runs that are right, watched as people watch runs, and pairs of monitors that differ in rounding or in nothing.

Weights in bfloat16 without finer copies are watched without parameters: norm weights of 1 do not move there, which is a finding of its
own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from reported_bugs import models
from reported_bugs.case import Healthy, Plant, in_model, nothing, other_function, when_ready
from reported_bugs.faults.in_data import before_step
from reported_bugs.faults.watched import (
    AMP,
    BF16,
    BOTH,
    DDP,
    EAGER,
    FP16,
    FSDP,
    LLAMA,
    MOE,
    TRAINER,
    WATCH,
    data,
    decays,
    minus_infinity,
    output_of,
    rate_of,
)
from reported_bugs.training import Batch, Program, Setting
from torch import Tensor, nn


def longer_sequences(step: int, rows: Batch) -> Batch:
    """A curriculum: short rows first."""
    rows = dict(rows)
    length = 8 if step < 20 else 16 if step < 40 else models.LENGTH
    for key in ("tokens", "mask"):
        rows[key] = rows[key] * (torch.arange(models.LENGTH) < length)
    rows["labels"] = torch.where(torch.arange(models.LENGTH) < length - 1, rows["labels"], -100)
    return rows


def hard_batch(step: int, rows: Batch) -> Batch:
    """One batch of rare words."""
    if step == 37:
        rows["labels"] = torch.where(rows["labels"] == -100, -100, 255 - rows["labels"] // 4)
    return rows


def resumed(p: Program) -> None:
    """All is saved, made anew and read back."""
    kept = {key: value.clone() for key, value in p.model.state_dict().items()}
    state, schedule = p.optimizer.state_dict(), p.scheduler.state_dict()
    p.optimizer = p.make_optimizer()
    p.optimizer.load_state_dict(state)
    p.scheduler = torch.optim.lr_scheduler.LambdaLR(p.optimizer, p.rate)
    p.scheduler.load_state_dict(schedule)
    p.model.load_state_dict(kept)


def idle_once(p: Program) -> None:
    """No token chooses an expert in one step."""
    for layer in p.model.layers:
        own, count = layer.mlp.probabilities, [0]

        def probabilities(x: Tensor, own: Any = own, count: Any = count) -> Tensor:
            count[0] += 1
            found: Tensor = own(x)
            return found * torch.tensor([1.0, 1e-9, 1.0, 1.0]) if count[0] == 26 else found

        layer.mlp.probabilities = probabilities


def large_scale(p: Program) -> None:
    p.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)


def sparse_rows(p: Program) -> None:
    """Most rows of the embedding have no gradient in a step: few words."""
    own = p.rows_of

    def rows(step: int) -> Batch:
        found = own(step)
        found["tokens"] = (found["tokens"] - 3).clamp(min=0) % 5 * 3 + step % 7 + 3
        return found

    p.rows_of = rows  # type: ignore[method-assign]


def adapters(model: Any) -> None:
    """The base is frozen, adapters learn."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.layers:
        own, down, up = layer.mlp.forward, nn.Linear(models.HIDDEN, 4, bias=False), nn.Linear(4, models.HIDDEN, bias=False)
        nn.init.zeros_(up.weight)
        layer.mlp.lora_a, layer.mlp.lora_b = down, up
        layer.mlp.forward = lambda x, own=own, down=down, up=up: own(x) + up(down(x))


def restarts(step: int) -> float:
    return decays((step % 20) * 3)


def growing_batch(p: Program) -> None:
    """Rows of a step grow, as with a ramp-up of the batch size."""
    own = p.rows_of

    def rows(step: int) -> Batch:
        found = own(step)
        return {key: value[: 2 if step < 20 else 4] for key, value in found.items()}

    def batches(step: int) -> list[Batch]:
        return [rows(step)]

    p.batches = batches  # type: ignore[method-assign]


def plain_sgd(p: Program) -> None:
    p.make_optimizer = lambda: torch.optim.SGD(p.groups(), lr=0.01, momentum=0.9)  # type: ignore[method-assign]


def warm_cosine(step: int) -> float:
    return min(1.0, (step + 1) / 10) * decays(step)


def one(name: str, setting: Setting, plant: Plant = nothing, levels: tuple[str, ...] = BOTH) -> Healthy:
    return Healthy(f"watched: {name}", setting, None, plant, levels)


def two(name: str, setting: Setting, other: Setting, plant: Plant = nothing, levels: tuple[str, ...] = BOTH) -> Healthy:
    return Healthy(f"monitors: {name}", setting, other, plant, levels)


def second_kernel(p: Program) -> None:
    for layer in p.model.layers:
        layer.attention.fused = False


S: Callable[..., Setting] = lambda s, **k: replace(s, steps=24, **k)  # noqa: E731

CASES = (
    one("warm-up and cosine", BF16, rate_of(warm_cosine), WATCH),
    one("warm-up and cosine, amp", replace(AMP, lr=3e-3), rate_of(warm_cosine)),
    one("curriculum", AMP, data(longer_sequences)),
    one("four micro batches", replace(AMP, micro=4)),
    one("dropout", replace(BF16, changes=(("dropout", 0.2),)), levels=WATCH),
    one("dropout, amp", replace(AMP, changes=(("dropout", 0.2),))),
    one("resumed", AMP, before_step(30, resumed)),
    one("an expert idle once", MOE, when_ready(idle_once), ("watch", "monitor", "nan")),
    one("masks of -inf", replace(EAGER, dtype="amp"), other_function("attend", minus_infinity), ("watch", "nan", "monitor")),
    one("first steps skipped by the scaler", FP16, when_ready(large_scale), ("watch", "nan", "monitor")),
    one("one hard batch", AMP, data(hard_batch)),
    one("rows of an embedding without gradient", AMP, when_ready(sparse_rows)),
    one("adapters over a frozen base", AMP, in_model(adapters)),
    one("restarts of the learning rate", AMP, rate_of(restarts)),
    one("a growing batch", AMP, when_ready(growing_batch)),
    one("plain sgd", replace(AMP, dtype="fp32"), plain_sgd),
    one("ddp", replace(DDP, lr=3e-3)),
    one("fsdp", replace(FSDP, lr=3e-3)),
    one("trainer", replace(TRAINER, lr=1e-3), nothing, ("watch",)),
    one("llama", LLAMA),
    one("tied embeddings", replace(AMP, changes=(("tied", True),))),
    two("eager attention for fused, bf16", S(EAGER), S(BF16)),
    two("two micro batches", S(BF16), S(BF16, micro=2)),
    two("two micro batches, amp", S(AMP), S(AMP, micro=2)),
    two("two ranks for one", S(AMP), S(DDP)),
    two("fsdp for ddp", S(DDP), S(FSDP)),
    two("a longer run", S(AMP), replace(AMP, steps=40)),
    two("a repeat", S(BF16), S(BF16), output_of("norm", lambda _n, out: out)),
    two("llama: eager attention", S(LLAMA), S(LLAMA, attention="eager")),
    two("dropout, a repeat", S(AMP, changes=(("dropout", 0.1),)), S(AMP, changes=(("dropout", 0.1),))),
)
