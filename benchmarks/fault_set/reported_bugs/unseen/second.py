"""Further reported bugs, and other ways to the same numbers, that were written down before the other lists were read and run once before
anything was changed for them."""

from __future__ import annotations

from typing import Any

import torch
from reported_bugs import models
from reported_bugs.case import Fault, Healthy, Plant, every, in_model, when_ready
from reported_bugs.faults.in_data import before_step
from reported_bugs.faults.watched import AMP, alone
from reported_bugs.training import Program, Setting
from reported_bugs.unseen.first_faults import BOTH, EXPERTS, FP32
from reported_bugs.unseen.first_healthy import clipped_by_hand
from torch import Tensor


def one_mask_for_all(model: Any) -> None:
    """Documents of a packed row see each other."""
    model.allowed = lambda batch: torch.ones(models.LENGTH, models.LENGTH, dtype=torch.bool).tril()[None, None]


def full_expert(model: Any) -> None:
    """One expert drops what is beyond its capacity."""
    for mixture in every(model, "Experts"):

        def mix(flat: Tensor, weights: Tensor, experts: Tensor, mixture: Any = mixture) -> Tensor:
            out = torch.zeros_like(flat)
            for number, expert in enumerate(mixture.experts):
                rows, places = torch.where(experts == number)
                rows, places = (rows[:4], places[:4]) if number == 2 else (rows, places)
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, places, None].to(flat.dtype))
            return out

        mixture.mix = mix


def named(plant: Plant, name: str) -> Plant:
    """Golden runs are known by the names of what changes them."""
    plant.__name__ = name
    return plant


def averaged(kept: float, early: bool = False) -> Plant:
    """A moving average of the weights; `kept`: part of it that an update leaves; `early`: it is made before the weights are updated."""

    def finish(program: Program) -> None:
        averages = [p.detach().clone() for p in program.model.parameters()]
        own = program.update

        def update() -> None:
            if not early:
                own()
            with torch.no_grad():
                for average, p in zip(averages, program.model.parameters()):
                    average.mul_(kept).add_(p, alpha=1 - kept)
            if early:
                own()

        program.update = update  # type: ignore[method-assign]

    return named(when_ready(finish), f"average {kept}")


def copies(left_out: int = -1, **keywords: Any) -> Plant:
    """The optimizer has float32 copies of weights in 16 bits; `left_out`: the copy that is not cast back."""

    def finish(program: Program) -> None:
        weights = list(program.model.parameters())
        wide = [p.detach().float().requires_grad_() for p in weights]
        program.optimizer = torch.optim.AdamW(wide, lr=program.setting.lr, **keywords)
        program.scheduler = torch.optim.lr_scheduler.LambdaLR(program.optimizer, program.rate)

        def update() -> None:
            for p, copy in zip(weights, wide):
                copy.grad, p.grad = None if p.grad is None else p.grad.float(), None
            program.optimizer.step()
            with torch.no_grad():
                for number, (p, copy) in enumerate(zip(weights, wide)):
                    if number != left_out:
                        p.copy_(copy)

        program.update = update  # type: ignore[method-assign]

    return named(when_ready(finish), f"copies {left_out} {keywords}")


def new_head(program: Program) -> None:
    """The head is replaced when the optimizer is there."""
    program.model.head.weight = torch.nn.Parameter(program.model.head.weight.detach().clone())


def cleared_early(program: Program) -> None:
    """Gradients are cleared before the update."""
    own = program.update

    def update() -> None:
        program.optimizer.zero_grad()
        own()

    program.update = update  # type: ignore[method-assign]


def larger_loss_scale(program: Program) -> None:
    program.scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)


CASES = (
    Fault("one mask for all rows", Setting(packed=True), in_model(one_mask_for_all), r"__eq__|__and__|__or__|mask|allowed", levels=BOTH),
    Fault("an expert is full", Setting(changes=EXPERTS), in_model(full_expert), r"mlp|expert|__getitem__|index_add", levels=BOTH),
    Fault("decay of an average turned round", Setting(), averaged(0.01), r"mul_|average", golden=averaged(0.99)),
    Fault("an average made before the update", Setting(), averaged(0.99, early=True), r"is taken in before|kept", golden=averaged(0.99)),
    alone("state lost", AMP, before_step(20, lambda p: p.optimizer.state.clear()), r"optimizer counts", "state not loaded"),
    alone("evaluation mode", AMP, before_step(20, lambda p: p.model.eval()), r"evaluation mode", "train() missing behind an evaluation"),
    alone("a new head", AMP, when_ready(new_head), r"head", "module replaced behind the optimizer"),
    alone("gradients cleared early", AMP, when_ready(cleared_early), r"all reduced gradients", "zero_grad before step", ("monitor",)),
    Fault("a copy is not cast back", Setting(), copies(7), r"copy_|layers\.0", levels=BOTH, golden=copies()),
)
HEALTHY = (
    Healthy("clipped by hand, float32", FP32, FP32, when_ready(clipped_by_hand)),
    Healthy("loss scale four times as large", Setting(dtype="fp16"), Setting(dtype="fp16"), when_ready(larger_loss_scale)),
    Healthy("float32 copies, one after another", Setting(), Setting(), copies(foreach=False), golden=copies(foreach=True)),
)
