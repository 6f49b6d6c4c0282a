"""Bugs in losses, labels, data and recomputation, written down as those of `reported_bugs.unseen.third_in_models` were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from reported_bugs import models
from reported_bugs.case import Fault, Plant, when_ready
from reported_bugs.training import Program, Setting
from reported_bugs.unseen.second import named
from reported_bugs.unseen.third_in_models import (
    AMP,
    BF16,
    BOTH,
    END,
    HEAD,
    LABELS,
    LOSS,
    MOE,
    PACKED,
    PROMPTS,
    RATE,
    READ,
    WRITTEN,
    edited,
)
from torch import Tensor
from torch.nn import functional as F


class FusedLoss(torch.autograd.Function):
    """Computes the gradient of the logits in the forward pass; `fault`: what comes in from behind is not taken into account."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, fault: bool) -> Tensor:
        with torch.enable_grad():
            wide = logits.detach().float().requires_grad_()
            loss = F.cross_entropy(wide.view(-1, wide.shape[-1]), labels.reshape(-1), ignore_index=-100, reduction="sum")
            (grad,) = torch.autograd.grad(loss, wide)
        ctx.save_for_backward(grad)
        ctx.fault, ctx.dtype = fault, logits.dtype
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (own,) = ctx.saved_tensors
        return (own if ctx.fault else own * grad).to(ctx.dtype), None, None


def fused_loss(fault: bool) -> Plant:
    def finish(program: Program) -> None:
        program.criterion = lambda logits, labels: FusedLoss.apply(logits, labels, fault)  # type: ignore[method-assign]

    return named(when_ready(finish), "fused loss")


class Recomputed(torch.autograd.Function):
    """Recomputation that does not keep the autocast of the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, turn: Any, allowed: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rest = layer, turn, allowed
        return layer(x, turn, allowed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer, turn, allowed = ctx.rest
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(layer(x, turn, allowed), grad)
        return x.grad, None, None, None


def autocast_lost(model: Any) -> None:
    def forward(batch: dict[str, Tensor]) -> Tensor:
        x = model.embedding(batch["tokens"])
        turn, allowed = model.rotary(x, batch["positions"]), model.allowed(batch)
        for layer in model.layers:
            x = Recomputed.apply(x, layer, turn, allowed)
        return model.head(model.norm(x))

    model.forward = forward


def other_rows(name: str, change: Any) -> Plant:
    """Other data: `change` gets the rows of a step."""

    def finish(program: Program) -> None:
        own = program.rows_of
        program.rows_of = lambda step: change(own(step))  # type: ignore[method-assign]

    return named(when_ready(finish), name)


def answers(early: int) -> Plant:
    """Labels of prompts do not count; `early`: as many more do."""

    def change(rows: dict[str, Tensor]) -> dict[str, Tensor]:
        prompts = torch.tensor(PROMPTS)[:, None] - early
        return {**rows, "labels": torch.where(torch.arange(models.LENGTH)[None] < prompts, -100, rows["labels"])}

    return other_rows("answers", change)


def mean_of_sequences(program: Program) -> None:
    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=-100, reduction="none").sum(1)
        counts = (labels != -100).sum(1)
        return (each / counts).mean() * counts.sum()

    program.criterion = criterion  # type: ignore[method-assign]


def balance_of_each_micro_batch(program: Program) -> None:
    def loss(batch: Any, tokens: Tensor) -> Tensor:
        logits, auxiliary = program.logits(batch)
        return program.criterion(logits, batch["labels"]) / tokens * program.scale() + auxiliary

    program.loss = loss  # type: ignore[method-assign]


CASES = (
    Fault(
        "balance of each micro batch in full",
        replace(MOE, micro=2),
        when_ready(balance_of_each_micro_batch),
        r"loss|auxiliary|__add__|div|balance|mlp|router",
        "NVIDIA-NeMo/Automodel#3359",
        BOTH,
    ),
    Fault(
        "fused loss ignores its gradient",
        BF16,
        fused_loss(True),
        r"FusedLoss|loss|criterion|head.*backward|__mul__",
        "linkedin/Liger-Kernel#968",
        BOTH,
        golden=fused_loss(False),
    ),
    Fault(
        "autocast lost in recomputation",
        AMP,
        edited("lost", autocast_lost),
        r"recomput|float32|bfloat16|layers|autocast|dtype",
        "autocast of checkpoints",
        ("mix",),
        other=replace(AMP),
        golden=named(lambda p: p.configure.append(lambda config: config.update(checkpoint="new")), "recomputed"),
    ),
    Fault(
        "a word is masked as padding",
        BF16,
        other_rows("end", lambda rows: {**rows, "labels": torch.where(rows["labels"] == END, -100, rows["labels"])}),
        LABELS,
        "pad token is eos",
        BOTH,
        coarse=HEAD,
    ),
    Fault(
        "mask of answers one off",
        BF16,
        answers(1),
        LABELS + "|__sub__|__lt__|early",
        "verl-project/verl#3287",
        BOTH,
        coarse=HEAD,
        golden=answers(0),
    ),
    Fault("mean of sequences", AMP, when_ready(mean_of_sequences), LOSS, "verl-project/verl#1233", BOTH, coarse=HEAD),
    Fault(
        "a word is read as another",
        BF16,
        other_rows("read", lambda rows: {**rows, "tokens": torch.where(rows["tokens"] == READ, WRITTEN, rows["tokens"])}),
        r"token|embedding|data|batch|input|where",
        "tokenizer",
        BOTH,
    ),
    Fault(
        "documents end one late",
        PACKED,
        other_rows("late", lambda rows: {**rows, "documents": F.pad(rows["documents"], (1, -1))}),
        r"document|__eq__|mask|allowed|data|batch|pad|input",
        "cu_seqlens",
        BOTH,
    ),
    Fault(
        "dropout of another rate",
        Setting(changes=(("dropout", 0.1),)),
        named(lambda p: p.configure.append(lambda config: config.update(dropout=RATE)), "rate"),
        "drop",
        "config",
        BOTH,
    ),
)
