"""Faults that one run shows by itself: NaN and Inf, dead parts, jumps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from reported_bugs import models
from reported_bugs.case import Fault, every, in_model, other_function, when_ready
from reported_bugs.faults.in_models import AMP, GPT, MOE, mlp_detached
from reported_bugs.faults.in_updates import optimizer_of_copies
from reported_bugs.training import Program, Setting
from torch import Tensor
from torch.nn import functional as F

LONG = replace(AMP, steps=60)
"""Rules learn from 20 steps. Weights are in float32: norm weights of 1 in bfloat16 do not move, which is a finding of its own."""
FP16 = Setting(dtype="fp16")


def infinite_mask(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, fused: bool) -> Tensor:
    """Rows in which nothing may be seen become NaN."""
    nowhere = allowed & ~torch.eye(allowed.shape[-1], dtype=torch.bool)
    scores = (torch.matmul(q, k.transpose(-1, -2)) * scale).masked_fill(~nowhere, float("-inf"))
    return torch.matmul(torch.softmax(scores.float(), -1).to(q.dtype), v)


def log_of_zero(p: Program) -> None:
    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        chances = torch.softmax(logits.float().view(-1, logits.shape[-1]) * 600, -1)
        return F.nll_loss(torch.log(chances), labels.reshape(-1), ignore_index=-100, reduction="sum")

    p.criterion = criterion  # type: ignore[method-assign]


def norm_of_zero(model: Any) -> None:
    """The gradient of a norm at zero: padding rows of an embedding that are divided by their length."""
    own = model.embedding.forward

    def forward(tokens: Tensor) -> Tensor:
        x = own(tokens) * (tokens != 0)[..., None]
        return x / (x.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6)

    model.embedding.forward = forward


def mean_of_nothing(p: Program) -> None:
    """All labels of a micro batch are ignored, and the loss is their mean."""
    own = p.rows_of

    def rows(step: int) -> Any:
        found = own(step)
        return {**found, "labels": torch.full_like(found["labels"], -100)} if step == 1 else found

    p.rows_of = rows  # type: ignore[method-assign]


def scores_overflow(model: Any) -> None:
    for attention in every(model, models.Attention):
        attention.scale = 1.0
        attention.q.weight.data.mul_(600)
        attention.k.weight.data.mul_(600)


def dead_expert(model: Any) -> None:
    """One expert never wins."""
    for moe in every(model, models.Experts):
        own = moe.probabilities
        moe.probabilities = lambda x, own=own: own(x) * torch.tensor([1.0, 1.0, 1.0, 1e-6])


def jump(number: int, factor: float) -> Any:
    def plant(p: Program) -> None:
        own = p.step

        def step(at: int) -> Tensor:
            if at == number:
                p.scheduler.lr_lambdas = [lambda _step: factor for _ in p.scheduler.lr_lambdas]
                for group in p.optimizer.param_groups:
                    group["lr"] *= factor
            return own(at)

        p.step = step  # type: ignore[method-assign]

    return when_ready(plant)


def spike(p: Program) -> None:
    own = p.loss
    count = [0]

    def loss(batch: Any, tokens: Tensor) -> Tensor:
        count[0] += 1
        return own(batch, tokens) * (200.0 if count[0] == 41 else 1.0)

    p.loss = loss  # type: ignore[method-assign]


def weights_blown(p: Program) -> None:
    own = p.step

    def step(at: int) -> Tensor:
        if at == 40:
            p.model.layers[1].mlp.down.weight.data.mul_(300)
        return own(at)

    p.step = step  # type: ignore[method-assign]


def data_of_one_token(p: Program) -> None:
    own = p.rows_of

    def rows(step: int) -> Any:
        found = own(step)
        if step >= 40:
            found["tokens"] = torch.full_like(found["tokens"], 7)
        return found

    p.rows_of = rows  # type: ignore[method-assign]


CASES = (
    Fault(
        "alone: rows with nothing to see",
        replace(GPT, changes=(("fused", False),)),
        other_function("attend", infinite_mask),
        r"layers\.0\.attention|softmax|masked_fill",
        "left padding with -inf",
        ("mix", "L1", "L0", "monitor"),
        0,
        True,
    ),
    Fault(
        "alone: log of zero",
        replace(GPT, lr=5e-3),
        when_ready(log_of_zero),
        r"Torch\.log|nll|in criterion",
        "log(softmax)",
        ("mix", "L1", "monitor"),
        0,
        True,
        coarse=r"loss|head|grad",
    ),
    Fault(
        "alone: gradient of a norm at zero",
        Setting(dtype="fp32"),
        in_model(norm_of_zero),
        r"embedding|sqrt",
        "sqrt at zero",
        ("mix", "L1", "L0", "monitor"),
        0,
        True,
    ),
    Fault(
        "alone: mean of nothing",
        replace(GPT, lr=5e-3),
        when_ready(mean_of_nothing),
        r"truediv|\bdiv|loss|tokens",
        "all labels ignored",
        ("mix", "L1", "monitor"),
        1,
        True,
    ),
    Fault(
        "alone: scores overflow in float16",
        replace(FP16, changes=(("fused", False),)),
        in_model(scores_overflow),
        r"layers\.0\.attention|matmul|linear\.0",
        "float16 scores",
        ("mix", "L1", "L0", "monitor"),
        0,
        True,
    ),
    Fault(
        "alone: dead expert",
        replace(MOE, dtype="amp", steps=60),
        in_model(dead_expert),
        r"experts\.3",
        "router collapse",
        ("monitor",),
        -1,
        True,
    ),
    Fault(
        "alone: learning rate jumps",
        LONG,
        jump(40, 30.0),
        r"learning|lr|update|loss|param|ratio",
        "resume with another schedule",
        ("monitor",),
        40,
        True,
    ),
    Fault("alone: loss spikes", LONG, when_ready(spike), r"loss|grad", "bad batch", ("monitor",), 40, True),
    Fault(
        "alone: loss explodes",
        LONG,
        jump(40, 1000.0),
        r"loss|grad|param|update|actv|ratio",
        "learning rate",
        ("monitor",),
        -1,
        True,
    ),
    Fault(
        "alone: a branch without gradient",
        LONG,
        in_model(mlp_detached),
        r"layers\.1\.norm2|norm2",
        "detach left in",
        ("monitor",),
        -1,
        True,
    ),
    Fault(
        "alone: weights do not move",
        LONG,
        when_ready(optimizer_of_copies),
        r"update|param|optimizer|grad|learn",
        "optimizer of other tensors",
        ("monitor",),
        -1,
        True,
    ),
    Fault(
        "alone: weights blown up",
        LONG,
        when_ready(weights_blown),
        r"layers\.1\.mlp\.down|loss|param",
        "bad restore",
        ("monitor",),
        40,
        True,
    ),
    Fault(
        "alone: data of one token",
        LONG,
        when_ready(data_of_one_token),
        r"loss|embedding|actv",
        "broken shard of data",
        ("monitor",),
        40,
        True,
    ),
)
