"""Reported bugs in accumulation, clipping, optimizer, schedule and resuming."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from reported_bugs.case import Fault, when_ready
from reported_bugs.faults.in_data import before_step
from reported_bugs.faults.in_models import ALL, AMP, GPT, TWO
from reported_bugs.training import Program, Setting
from torch import Tensor

MICRO = Setting(micro=2)
AMP_MICRO = Setting(dtype="amp", micro=2)
WARM = Setting(warmup=4)
MONITORED = ("mix", "monitor")


def one_group(p: Program) -> None:
    p.groups = lambda: [{"params": list(p.model.parameters()), "weight_decay": p.setting.decay}]  # type: ignore[method-assign]


def l2_adam(p: Program) -> None:
    p.make_optimizer = lambda: torch.optim.Adam(p.groups(), lr=p.setting.lr, betas=(0.9, 0.95), eps=1e-8)  # type: ignore[method-assign]


def optimizer_of(**changes: Any) -> Any:
    def plant(p: Program) -> None:
        p.setting = replace(p.setting, optimizer=tuple(changes.items()))

    return plant


def parameters_left_out(p: Program) -> None:
    own = p.groups

    def groups() -> list[dict[str, Any]]:
        found, out = own(), {id(q) for q in p.model.layers[1].mlp.parameters()}
        return [{**group, "params": [q for q in group["params"] if id(q) not in out]} for group in found]

    p.groups = groups  # type: ignore[method-assign]


def optimizer_of_copies(p: Program) -> None:
    """The optimizer was made before the model was moved: it holds other tensors."""
    groups = [{**group, "params": [q.detach().clone().requires_grad_() for q in group["params"]]} for group in p.groups()]
    p.groups = lambda: groups  # type: ignore[method-assign]
    p.optimizer = p.make_optimizer()
    p.scheduler = torch.optim.lr_scheduler.LambdaLR(p.optimizer, p.rate)
    own = p.optimizer.zero_grad
    p.optimizer.zero_grad = lambda set_to_none=True: (p.model.zero_grad(), own(set_to_none))


def not_zeroed(p: Program) -> None:
    p.optimizer.zero_grad = lambda set_to_none=True: None


def zeroed_between(p: Program) -> None:
    own = p.backward

    def backward(loss: Tensor) -> None:
        p.model.zero_grad()
        own(loss)

    p.backward = backward  # type: ignore[method-assign]


def clipped_after(p: Program) -> None:
    clip, update = p.clip, p.update
    p.clip = lambda: None  # type: ignore[method-assign]
    p.update = lambda: (update(), clip())[0]  # type: ignore[method-assign,func-returns-value]


def clipped_by_value(p: Program) -> None:
    p.clip = lambda: torch.nn.utils.clip_grad_value_(p.model.parameters(), 0.01)  # type: ignore[method-assign]


def clipped_scaled(p: Program) -> None:
    p.clip = lambda: (torch.nn.utils.clip_grad_norm_(p.model.parameters(), p.setting.clip), None)[1]  # type: ignore[method-assign]


def no_loss_scale(p: Program) -> None:
    p.scaler = None


def step_per_micro_batch(p: Program) -> None:
    own = p.backward
    p.backward = lambda loss: (own(loss), p.scheduler.step())[0]  # type: ignore[method-assign,func-returns-value]


def warm_from_zero(p: Program) -> None:
    p.rate = lambda step: min(1.0, step / (p.setting.warmup + 1))  # type: ignore[method-assign]


def first_group_only(p: Program) -> None:
    for group in p.optimizer.param_groups[1:]:
        group["lr"] = p.setting.lr
    p.scheduler.lr_lambdas[1] = lambda _step: 1.0


def states_lost(p: Program) -> None:
    p.optimizer.state.clear()


def schedule_lost(p: Program) -> None:
    p.scheduler = torch.optim.lr_scheduler.LambdaLR(p.optimizer, p.rate)


def weights_rounded(p: Program) -> None:
    """A checkpoint in bf16 is loaded into float32 weights."""
    for parameter in p.model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())


def average_applied(p: Program) -> None:
    for parameter in p.model.parameters():
        parameter.data.mul_(0.98)


def states_in_bf16(p: Program) -> None:
    own = p.update

    def update() -> None:
        own()
        for state in p.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].bfloat16())

    p.update = update  # type: ignore[method-assign]


def gradients_in_bf16(p: Program) -> None:
    own = p.backward

    def backward(loss: Tensor) -> None:
        own(loss)
        for parameter in p.model.parameters():
            parameter.grad.copy_(parameter.grad.bfloat16())

    p.backward = backward  # type: ignore[method-assign]


def momentum_scaled(p: Program) -> None:
    """What is multiplied by the learning rate is the first moment itself (vectors only)."""
    own = p.update

    def update() -> None:
        own()
        for parameter, state in p.optimizer.state.items():
            if parameter.dim() == 1:
                state["exp_avg"].mul_(0.5)

    p.update = update  # type: ignore[method-assign]


def not_written(p: Program) -> None:
    """A kernel that writes into a copy of a parameter that is not contiguous: it stays as it is."""
    weight, own = p.model.layers[0].attention.q.weight, p.update

    def update() -> None:
        kept = weight.detach().clone()
        own()
        weight.data.copy_(kept)

    p.update = update  # type: ignore[method-assign]


def second_moment_not_written(p: Program) -> None:
    weight, own = p.model.layers[0].mlp.up.weight, p.update

    def update() -> None:
        kept = p.optimizer.state[weight]["exp_avg_sq"].clone() if weight in p.optimizer.state else None
        own()
        if kept is not None:
            p.optimizer.state[weight]["exp_avg_sq"].copy_(kept)

    p.update = update  # type: ignore[method-assign]


UPDATE = (
    r"exp_avg|update/|ratio/|Torch\._foreach|Tensor\.(mul_|addcdiv_|addcmul_|lerp_|sub_|add_)"
    r"|update|optimizer|weight_decay|\blr\b|learning.rate"
)
"""Calls of an optimizer, numbers of it, and words for it."""

CASES = (
    Fault("decay of norms and biases", GPT, one_group, UPDATE + "|norm|bias", "one parameter group", ("mix", "L0", "monitor")),
    Fault("decay of norms and biases, amp", AMP, one_group, UPDATE + "|norm|bias", "one parameter group", MONITORED),
    Fault("Adam for AdamW", GPT, l2_adam, UPDATE, "weight decay as L2", (*ALL, "monitor")),
    Fault("beta2", GPT, optimizer_of(betas=(0.9, 0.999)), UPDATE + "|parameter|weight", "default betas", (*ALL, "monitor")),
    Fault("eps of the optimizer", GPT, optimizer_of(eps=1e-5), UPDATE + "|parameter|weight", "default eps", (*ALL, "monitor")),
    Fault("learning rate 10 % off", GPT, optimizer_of(lr=1.1e-3), UPDATE + "|parameter|weight|embedding", "config", (*ALL, "monitor")),
    Fault(
        "parameters left out of the optimizer",
        GPT,
        parameters_left_out,
        r"layers\.1\.mlp",
        "parameters added after the optimizer",
        (*ALL, "monitor"),
    ),
    Fault(
        "optimizer of other tensors",
        GPT,
        when_ready(optimizer_of_copies),
        UPDATE + "|parameter|weight|embedding|not moved",
        "optimizer made before the model was moved",
        (*ALL, "monitor"),
    ),
    Fault(
        "gradients not zeroed",
        GPT,
        when_ready(not_zeroed),
        r"grad|clip|norm|zero|" + UPDATE,
        "deepspeedai/DeepSpeed#7837",
        (*ALL, "monitor"),
        1,
    ),
    Fault(
        "gradients zeroed between micro batches",
        MICRO,
        when_ready(zeroed_between),
        r"grad|clip|norm|zero|" + UPDATE,
        "zero_grad in the inner loop",
        (*ALL, "monitor"),
        0,
    ),
    Fault(
        "clipped after the update",
        replace(GPT, clip=0.1),
        when_ready(clipped_after),
        r"norm|clip|mul_|" + UPDATE,
        "order of calls",
        MONITORED,
    ),
    Fault("clipped by value", replace(GPT, clip=0.1), when_ready(clipped_by_value), r"clip|clamp|norm|" + UPDATE, "clip_grad_value_", TWO),
    Fault(
        "clipped with the loss scale on",
        Setting(dtype="fp16"),
        when_ready(clipped_scaled),
        r"clip|norm|scale|" + UPDATE,
        "clip before unscale_",
        MONITORED,
    ),
    Fault(
        "float16 without loss scale",
        Setting(dtype="fp16"),
        when_ready(no_loss_scale),
        r"scale|__mul__|backward|" + UPDATE,
        "autocast alone",
        MONITORED,
        coarse=r"scale|grad",
    ),
    Fault(
        "schedule stepped per micro batch",
        Setting(micro=2, warmup=4),
        when_ready(step_per_micro_batch),
        UPDATE + "|parameter|weight",
        "huggingface/accelerate#963",
        ("mix", "L0", "monitor"),
    ),
    Fault("warm-up from zero", WARM, warm_from_zero, UPDATE + "|parameter|weight|embedding", "off by one", MONITORED),
    Fault("schedule of the first group only", WARM, when_ready(first_group_only), UPDATE + "|norm|bias", "one of two groups", MONITORED),
    Fault(
        "resumed without optimizer state",
        GPT,
        before_step(2, states_lost),
        UPDATE + "|state|exp_avg|step",
        "resume of weights only",
        MONITORED,
        2,
    ),
    Fault(
        "resumed with the schedule reset", WARM, before_step(2, schedule_lost), UPDATE, "barrh: resume resets learning rate", MONITORED, 2
    ),
    Fault(
        "resumed with rounded weights",
        AMP,
        before_step(2, weights_rounded),
        r"weight|parameter|embedding|norm|between",
        "checkpoint in bf16",
        MONITORED,
        2,
    ),
    Fault(
        "average applied to live weights",
        GPT,
        before_step(1, average_applied),
        r"weight|parameter|embedding|between",
        "EMA swapped in",
        ("mix", "L0", "monitor"),
        1,
    ),
    Fault("states in bf16", AMP, when_ready(states_in_bf16), UPDATE + "|exp_avg|parameter|weight", "low-precision states", MONITORED),
    Fault(
        "gradients accumulated in bf16",
        AMP_MICRO,
        when_ready(gradients_in_bf16),
        r"grad|copy_|bfloat16|" + UPDATE,
        "deepspeedai/DeepSpeed#1800",
        MONITORED,
    ),
    Fault("first moment scaled in place", GPT, when_ready(momentum_scaled), UPDATE + "|exp_avg|norm|bias", "yangluo7/CAME#2", MONITORED),
    Fault(
        "a weight not written",
        GPT,
        when_ready(not_written),
        r"layers\.0\.attention\.q|copy_|linear\.0\.",
        "non-contiguous parameter on MPS, pytorch/pytorch#118117",
        (*ALL, "monitor"),
    ),
    Fault(
        "a second moment not written",
        GPT,
        when_ready(second_moment_not_written),
        r"layers\.0\.mlp\.up|copy_|linear\.5\.|exp_avg_sq",
        "bitsandbytes#1187",
        MONITORED,
    ),
)
