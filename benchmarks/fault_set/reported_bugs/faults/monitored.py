"""Faults between two monitored runs, where nothing was dumped: settings of the update, data, synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from reported_bugs.case import Fault, Plant, in_model, setting_of_model, when_ready
from reported_bugs.faults.in_data import before_step
from reported_bugs.faults.in_updates import optimizer_of, states_lost
from reported_bugs.faults.watched import BOTH
from reported_bugs.training import Batch, Program, Setting
from torch import nn
from torch.nn import functional as F

BF16, AMP = Setting(steps=24), Setting(dtype="amp", steps=24)
DDP = replace(AMP, ranks=2, wrap="ddp")
FSDP = replace(AMP, ranks=2, wrap="fsdp")
MOE = replace(AMP, changes=(("experts", 4),))
LLAMA = replace(AMP, family="llama")


def setting_of(**changes: Any) -> Plant:
    def plant(p: Program) -> None:
        p.setting = replace(p.setting, **changes)

    return plant


def other_init(model: Any) -> None:
    nn.init.normal_(model.layers[1].mlp.up.weight, std=0.03, generator=torch.Generator().manual_seed(5))


def one_not_reduced(p: Program) -> None:
    """One parameter is left out of the sum over ranks from step 5 on: each rank keeps its own gradient."""
    weight = p.model.layers[0].mlp.gate.weight
    own, count = p.clip, [0]
    kept: list[Any] = []
    weight.register_hook(lambda grad: (kept.append(grad.clone()), grad)[1])

    def clip() -> None:
        count[0] += 1
        if count[0] > 5:
            weight.grad.copy_(kept[-1])
        kept.clear()
        own()

    p.clip = clip  # type: ignore[method-assign]


def other_order(p: Program) -> None:
    own = p.rows_of
    p.rows_of = lambda step: own(step if step < 9 else step ^ 1)  # type: ignore[method-assign]


def group_rate(p: Program) -> None:
    p.scheduler.lr_lambdas[1] = lambda step: 0.9 * p.rate(step)
    p.optimizer.param_groups[1]["lr"] *= 0.9


def late_schedule(p: Program) -> None:
    own = p.rate
    p.rate = lambda step: own(max(0, step - 1))  # type: ignore[method-assign]


def smoothed(p: Program) -> None:
    p.criterion = lambda logits, labels: F.cross_entropy(  # type: ignore[method-assign]
        logits.float().view(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100, reduction="sum", label_smoothing=0.05
    )


def gradient_of(path: str, factor: float) -> Callable[[Program], None]:
    def change(p: Program) -> None:
        p.model.get_parameter(path).register_hook(lambda grad: grad * factor)

    return change


def other_seed_of_dropout(p: Program) -> None:
    torch.manual_seed(99)


def no_balance(p: Program) -> None:
    p.model.config.auxiliary = 0.0


def last_rows_lost(p: Program) -> None:
    own = p.rows_of

    def rows(step: int) -> Batch:
        found = own(step)
        if step >= 6:
            found["labels"][-1] = -100
        return found

    p.rows_of = rows  # type: ignore[method-assign]


def branch(path: str, factor: float) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        module = model.get_submodule(path)
        own = module.forward
        module.forward = lambda x: own(x) * factor

    return edit


def forgotten(p: Program) -> None:
    """The state of one parameter is not in the checkpoint that was resumed from."""
    p.optimizer.state.pop(p.model.layers[1].mlp.down.weight)


class AdamWithStates(torch.optim.Optimizer):
    """AdamW that computes in float32 and keeps its states in a type of its own."""

    def __init__(self, groups: Any, lr: float, states: torch.dtype) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0})
        self.states = states

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for q in (q for q in group["params"] if q.grad is not None):
                state = self.state[q]
                number = state["step"] = state.get("step", 0) + 1
                grad = q.grad.float()
                kept = [state.get(key, torch.zeros_like(grad)).float() for key in ("exp_avg", "exp_avg_sq")]
                mean, square = first * kept[0] + (1 - first) * grad, second * kept[1] + (1 - second) * grad.square()
                state["exp_avg"], state["exp_avg_sq"] = mean.to(self.states), square.to(self.states)
                moved = (mean / (1 - first**number)) / ((square / (1 - second**number)).sqrt() + group["eps"])
                q.copy_((q.float() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * moved).to(q.dtype))


def states_in(dtype: torch.dtype) -> Plant:
    def plant(p: Program) -> None:
        p.make_optimizer = lambda: AdamWithStates(p.groups(), p.setting.lr, dtype)  # type: ignore[method-assign]

    return plant


SHORT_STATES, WIDE_STATES = states_in(torch.bfloat16), states_in(torch.float32)
UPDATE = r"update|beta|\beps\b|optimizer|exp_avg|weight_decay|decay|\blr\b|learning.rate|param"


def pair(
    name: str, setting: Setting, plant: Plant, truth: str, seen: str, step: int = -1, levels: tuple[str, ...] = BOTH, coarse: str = ""
) -> Fault:
    return Fault(f"monitors: {name}", setting, plant, truth, seen, levels, step, coarse=coarse)


CASES = (
    pair("weight decay off", AMP, setting_of(decay=0.0), UPDATE, "config"),
    pair("weight decay 2 % off", AMP, setting_of(decay=0.102), UPDATE, "config", levels=("monitor",)),
    pair("beta1", AMP, optimizer_of(betas=(0.88, 0.95)), UPDATE, "config"),
    *(
        Fault(f"monitors: optimizer states in bf16{name}", setting, SHORT_STATES, UPDATE, "exp_avg_dtype", ("monitor",), golden=WIDE_STATES)
        for name, setting in (("", AMP), (", weights in bf16", BF16), (" under fsdp", FSDP))
    ),
    pair("beta2, bf16", BF16, optimizer_of(betas=(0.9, 0.969)), UPDATE, "config"),
    pair("eps", AMP, optimizer_of(eps=1e-6), UPDATE, "config"),
    pair("learning rate 2 % off", AMP, optimizer_of(lr=1.02e-3), r"learning|\blr\b|update", "config", 0),
    pair("learning rate 2 % off, bf16", BF16, optimizer_of(lr=1.02e-3), r"learning|\blr\b|update", "config", 0),
    pair("clipping off", replace(AMP, clip=0.2), setting_of(clip=0.0), r"clip|grad|update|exp_avg", "config"),
    pair("one layer drawn anew", AMP, in_model(other_init), r"layers\.1\.mlp\.up", "seed per layer", 0),
    pair("one layer drawn anew, bf16", BF16, in_model(other_init), r"layers\.1\.mlp\.up", "seed per layer", 0),
    pair("one parameter not reduced", DDP, when_ready(one_not_reduced), r"layers\.0\.mlp\.gate", "ignored by ddp", 5, ("monitor",)),
    pair(
        "one parameter not reduced, watched",
        DDP,
        when_ready(one_not_reduced),
        r"layers\.0\.mlp\.gate|rank",
        "ignored by ddp",
        -1,
        ("watch",),
    ),
    pair("dropout on", AMP, setting_of_model(dropout=0.1), r"layers\.0\.|drop|loss|attention", "config", 0),
    pair(
        "other order of data", AMP, when_ready(other_order), r"data|embedding|batch|loss|sample|input_0", "sampler", 9, ("monitor", "watch")
    ),
    pair("optimizer state lost", AMP, before_step(8, states_lost), UPDATE, "resumed from weights only", 8, ("monitor",)),
    pair(
        "optimizer state lost, watched",
        AMP,
        before_step(8, states_lost),
        r"loss|grad|optimizer|update",
        "resumed from weights only",
        -1,
        ("watch",),
    ),
    pair("optimizer state of one weight lost", AMP, before_step(8, forgotten), r"layers\.1\.mlp\.down", "resumed", 8, ("monitor",)),
    pair("learning rate of a group", AMP, when_ready(group_rate), r"learning|norm|bias|\blr\b|update", "config", 0),
    pair("schedule one step late", replace(AMP, warmup=6), late_schedule, r"learning|\blr\b", "off by one", 1),
    pair("smoothed labels", BF16, when_ready(smoothed), r"loss|head|actv_grad/\.output", "config", 0),
    pair(
        "gradients of one weight x1.5",
        AMP,
        before_step(7, gradient_of("layers.1.attention.k.weight", 1.5)),
        r"layers\.1\.attention\.k",
        "custom backward",
        7,
        ("monitor",),
    ),
    pair(
        "gradients of one weight x1.5, bf16",
        BF16,
        before_step(7, gradient_of("layers.1.attention.k.weight", 1.5)),
        r"layers\.1\.attention\.k",
        "custom backward",
        7,
        ("monitor",),
    ),
    pair("balance of experts off", MOE, when_ready(no_balance), r"router|loss|mlp", "config", 0),
    pair("labels of the last row lost", AMP, when_ready(last_rows_lost), r"loss|head|label|token", "packing", 6, ("monitor", "watch")),
    pair(
        "a branch x1.05, bf16",
        BF16,
        in_model(branch("layers.0.mlp.down", 1.05)),
        r"layers\.0\.mlp",
        "scale",
        0,
        ("monitor",),
    ),
    pair("fsdp: learning rate 2 % off", FSDP, optimizer_of(lr=1.02e-3), r"learning|\blr\b|update", "config", 0),
    pair("llama: eps", LLAMA, optimizer_of(eps=1e-5), UPDATE, "config"),
)
