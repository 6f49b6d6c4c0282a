"""Other ways to the same numbers, that were written down before the other lists were read."""

from __future__ import annotations

from typing import Any

import torch
from reported_bugs.case import Healthy, every, in_model, other_function, when_ready
from reported_bugs.training import Program, Setting
from reported_bugs.unseen.first_faults import AMP, BF16, BOTH, EXPERTS, FP32
from torch import Tensor
from torch.nn import functional as F


def rotated_by_roll(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    sign = torch.ones(x.shape[-1], dtype=x.dtype)
    sign[:half] = -1
    return x.roll(half, -1) * sign


def fused_norms(model: Any) -> None:
    for norm in every(model, "RMSNorm"):
        norm.forward = lambda x, norm=norm: F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)


def expanded(x: Tensor, times: int) -> Tensor:
    batch, groups, length, size = x.shape
    return x[:, :, None].expand(batch, groups, times, length, size).reshape(batch, groups * times, length, size)


def by_log_softmax(program: Program) -> None:
    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        return F.nll_loss(
            F.log_softmax(logits.float().view(-1, logits.shape[-1]), -1), labels.reshape(-1), ignore_index=-100, reduction="sum"
        )

    program.criterion = criterion  # type: ignore[method-assign]


def in_two_parts(program: Program) -> None:
    own = program.criterion

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        parts = zip(logits.chunk(2, 1), labels.chunk(2, 1))
        return torch.stack([own(one.contiguous(), label.contiguous()) for one, label in parts]).sum()

    program.criterion = criterion  # type: ignore[method-assign]


def experts_backwards(model: Any) -> None:
    for mixture in every(model, "Experts"):

        def mix(flat: Tensor, weights: Tensor, experts: Tensor, mixture: Any = mixture) -> Tensor:
            out = torch.zeros_like(flat)
            for number in reversed(range(len(mixture.experts))):
                rows, places = torch.where(experts == number)
                out = out.index_add(0, rows, mixture.experts[number](flat[rows]) * weights[rows, places, None].to(flat.dtype))
            return out

        mixture.mix = mix


def gradients_zeroed(program: Program) -> None:
    own = program.optimizer.zero_grad
    program.optimizer.zero_grad = lambda set_to_none=True: own(set_to_none=False)


def clipped_by_hand(program: Program) -> None:
    def clip() -> None:
        gradients = [p.grad for p in program.model.parameters() if p.grad is not None]
        total = torch.stack([g.float().pow(2).sum() for g in gradients]).sum().sqrt()
        factor = torch.clamp(program.setting.clip / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))

    program.clip = clip  # type: ignore[method-assign]


def additive_mask(model: Any) -> None:
    own = model.allowed
    kind = model.embedding.weight.dtype

    def allowed(batch: dict[str, Tensor]) -> Tensor:
        seen = own(batch)
        return torch.zeros(seen.shape, dtype=kind).masked_fill(~seen, torch.finfo(kind).min)

    model.allowed = allowed


def squared_relu(program: Program) -> None:
    """An activation with a mask of truth values, which follow from numbers with noise."""

    def edit(model: Any) -> None:
        for mlp in every(model, "MLP"):
            mlp.forward = lambda x, mlp=mlp: mlp.down((mlp.gate(x) * (mlp.gate(x) > 0)).square() * mlp.up(x))

    program.change_model.append(edit)


def scale_in_the_query(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, _fused: bool) -> Tensor:
    scores = torch.matmul(q * scale, k.transpose(-1, -2)).masked_fill(~allowed, torch.finfo(q.dtype).min)
    return torch.matmul(torch.softmax(scores.float(), -1).to(q.dtype), v)


EAGER = (("fused", False),)

CASES = (
    Healthy("rotated by roll", BF16, BF16, other_function("rotated", rotated_by_roll), BOTH),
    Healthy("norms by one call", BF16, BF16, in_model(fused_norms), BOTH),
    Healthy("norms by one call in float32", FP32, FP32, in_model(fused_norms), BOTH),
    Healthy("groups expanded", AMP, AMP, other_function("repeated", expanded), BOTH),
    Healthy("loss by log_softmax", AMP, AMP, when_ready(by_log_softmax), BOTH),
    Healthy("loss in two parts", BF16, BF16, when_ready(in_two_parts), BOTH),
    Healthy("two micro batches for one", BF16, Setting(micro=2), levels=BOTH),
    Healthy("DDP against one process, autocast", AMP, Setting(dtype="amp", ranks=2, wrap="ddp"), levels=(*BOTH, "monitor")),
    Healthy(
        "FSDP2 against DDP, float32", Setting(dtype="fp32", ranks=2, wrap="ddp"), Setting(dtype="fp32", ranks=2, wrap="fsdp"), levels=BOTH
    ),
    Healthy("experts in reverse order", Setting(changes=EXPERTS), Setting(changes=EXPERTS), in_model(experts_backwards), BOTH),
    Healthy("gradients are zeroed", BF16, BF16, when_ready(gradients_zeroed), (*BOTH, "monitor")),
    Healthy(
        "one tensor after another in the update", FP32, Setting(dtype="fp32", optimizer=(("foreach", False),)), levels=("mix", "monitor")
    ),
    Healthy("clipped by hand", AMP, AMP, when_ready(clipped_by_hand), (*BOTH, "monitor")),
    Healthy("layers computed again", BF16, Setting(changes=(("checkpoint", "reentrant"),)), levels=BOTH),
    Healthy("mask is added", BF16, BF16, in_model(additive_mask), BOTH),
    Healthy("squared ReLU on two ranks", BF16, Setting(ranks=2, wrap="ddp"), squared_relu, BOTH, golden=squared_relu),
    Healthy("dropout twice", Setting(changes=(("dropout", 0.1),)), Setting(changes=(("dropout", 0.1),)), levels=(*BOTH, "monitor")),
    Healthy("scale in the query", Setting(changes=EAGER), Setting(changes=EAGER), other_function("attend", scale_in_the_query), BOTH),
)
