"""Bugs that people reported of single runs, which have nothing to be compared with; written down before the verdict engine and the
other lists were read. The size of each was drawn at random. They were run once before anything was changed for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from reported_bugs import models
from reported_bugs.case import Fault, Plant, every, in_model, when_ready
from reported_bugs.faults.in_data import before_step
from reported_bugs.faults.watched import data, output_of
from reported_bugs.training import Batch, Program, Setting
from reported_bugs.unseen.fourth_plants import DRAW, LAYER, drawn, some
from torch import Tensor
from torch.nn import functional as F

AMP, BF16, FP16 = Setting(dtype="amp", steps=60), Setting(steps=60), Setting(dtype="fp16", steps=60)
MOE, DDP = replace(AMP, changes=(("experts", 4),)), replace(AMP, ranks=2, wrap="ddp")
FSDP = replace(DDP, wrap="fsdp")
EAGER = Setting(changes=(("fused", False),))
WATCHED, MONITOR, DUMPED = ("watch", "monitor"), ("monitor",), ("mix", "L1", "L0")
START, GROWTH, WORSE = DRAW.randint(22, 34), drawn(1.01, 1.03), drawn(20, 60)


def from_step(number: int, change: Any) -> Plant:
    """What is done before every step from that one on."""

    def plant(p: Program) -> None:
        own = p.step

        def step(at: int) -> Tensor:
            if at >= number:
                change(p)
            return own(at)

        p.step = step  # type: ignore[method-assign]

    return when_ready(plant)


def grows(path: str, factor: float) -> Any:
    return lambda p: p.model.get_parameter(path).data.mul_(factor)


def dead(call: int, out: Tensor) -> Tensor:
    return out - 200 if call >= START else out


def collapses(p: Program) -> None:
    for mixture in every(p.model, "Experts"):
        own = mixture.probabilities
        mixture.probabilities = lambda x, own=own: own(x) * torch.tensor([1.0, 1e-9, 1e-9, 1e-9])
        mixture.top = 1


def one_bad_sample(p: Program) -> None:
    """The labels of one row are those of another language."""
    own, count = p.criterion, [0]

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        count[0] += 1
        return own(logits, labels) + (WORSE * own(logits[:1], labels[:1]) if count[0] == START + 1 else 0.0)

    p.criterion = criterion  # type: ignore[method-assign]


def scale_stuck(p: Program) -> None:
    p.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-18, growth_interval=10**9)


def product_of_mask(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, _fused: bool) -> Tensor:
    """Hidden scores are (1 - mask) times minus infinity: zero times infinity where the mask is one."""
    hidden = (1 - allowed.to(q.dtype)) * torch.tensor(float("-inf"), dtype=q.dtype)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale + hidden
    return torch.matmul(torch.softmax(scores.float(), -1).to(q.dtype), v)


def with_product(p: Program) -> None:
    models.attend = product_of_mask  # type: ignore[assignment]


def gradients_of_nothing(p: Program) -> None:
    """The optimizer has the parameters of the model before it was sharded again: those of one layer are others."""
    gone = {id(q) for name, q in p.model.named_parameters() if name.startswith(f"layers.{LAYER}.attention")}
    for group in p.optimizer.param_groups:
        group["params"] = [q for q in group["params"] if id(q) not in gone]


def zeroed_every_other(p: Program) -> None:
    """zero_grad stands before the update in every other step."""
    own, count = p.clip, [0]

    def clip() -> None:
        count[0] += 1
        if count[0] > START and count[0] % 2:
            for q in p.model.parameters():
                if q.grad is not None:
                    q.grad.zero_()
        own()

    p.clip = clip  # type: ignore[method-assign]


def noise(step: int, rows: Batch) -> Batch:
    """From here on a shard of data holds no text."""
    if step < START:
        return rows
    tokens = torch.randint(3, models.VOCAB, rows["tokens"].shape, generator=torch.Generator().manual_seed(step))
    return {**rows, "tokens": tokens * rows["mask"], "labels": torch.where(rows["labels"] == -100, -100, tokens.roll(-1, 1))}


def second_rank_late(p: Program) -> None:
    """One rank reads the rows of the other, a step later."""
    if p.rank == 1:
        own = p.batches

        def batches(step: int) -> list[Batch]:
            p.rank = 0
            try:
                return own(step - 1)
            finally:
                p.rank = 1

        p.batches = batches  # type: ignore[method-assign]


def square_overflows(model: Any) -> None:
    """The squares of a norm are taken in float16."""
    for norm in (model.layers[1].norm2,):

        def forward(x: Tensor, norm: Any = norm) -> Tensor:
            wide = (x * 2.0**13).half()
            return (norm.weight * (wide.float() * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).float() + norm.eps))).to(x.dtype)

        norm.forward = forward


def similarity_of_zero(p: Program) -> None:
    """A contrastive part of the loss divides by the length of a vector that is zero for padding."""

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        own = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100, reduction="sum")
        x = logits.float() * (labels != -100)[..., None]
        return own + 1e-3 * (x / x.norm(dim=-1, keepdim=True)).sum()

    p.criterion = criterion  # type: ignore[method-assign]


def alone(name: str, setting: Setting, plant: Plant, truth: str, seen: str, levels: tuple[str, ...] = WATCHED, **more: Any) -> Fault:
    return Fault(f"reported: alone: {name}", setting, plant, truth, seen, some(levels), alone=True, **more)


CASES = (
    alone(
        "a weight drifts", AMP, from_step(START, grows("layers.1.mlp.up.weight", GROWTH)), r"layers\.1\.mlp", "decay of wrong sign", MONITOR
    ),
    alone("an embedding explodes", AMP, from_step(START, grows("embedding.weight", 1.15)), r"embedding", "no decay, tied", WATCHED),
    alone("a dead layer", AMP, output_of(f"layers.{LAYER}.mlp.gate", dead), rf"layers\.{LAYER}\.(mlp|norm2)", "dead units"),
    alone("router collapses", MOE, before_step(START, collapses), r"router|experts|mlp", "router collapse"),
    alone("one bad sample", BF16, when_ready(one_bad_sample), r"loss|grad", "loss spike", step=START),
    alone("loss scale stuck", FP16, when_ready(scale_stuck), r"grad|scale|zero|underflow|update|param", "loss scale of one"),
    alone("zero times infinity", EAGER, with_product, r"layers\.0\.attention|\bmul|__mul__", "(1 - mask) * -inf", DUMPED, step=0),
    alone(
        "parameters that nobody updates",
        replace(FSDP, steps=40),
        when_ready(gradients_of_nothing),
        rf"layers\.{LAYER}\.attention",
        "groups",
    ),
    alone("gradients zeroed every other step", AMP, when_ready(zeroed_every_other), r"grad|update|zero", "zero_grad before step"),
    alone("data become noise", AMP, data(noise), r"data|loss|embedding|batch", "broken shard of data"),
    alone("one rank one step late", DDP, when_ready(second_rank_late), r"rank 1|data|batch", "loader of one rank", MONITOR),
    alone(
        "squares overflow in float16",
        replace(AMP, steps=3),
        in_model(square_overflows),
        r"layers\.1\.norm2|pow",
        "norm in half",
        DUMPED,
        step=0,
    ),
    alone(
        "length of a zero vector",
        replace(AMP, steps=3),
        when_ready(similarity_of_zero),
        r"norm|div|criterion",
        "cosine of padding",
        ("mix", "L1"),
        step=0,
    ),
)
