"""Bugs in updates, data and ranks, for dumps, for two monitored runs and for one run alone; written down from reports before the verdict
engine and the other lists were read; the size of each was drawn at random. They were run once before anything was changed for them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from reported_bugs.case import Fault, Plant, when_ready
from reported_bugs.faults.in_ranks import DATA, REDUCED, second_rank
from reported_bugs.training import Program, Setting
from reported_bugs.unseen.second import averaged, copies, named
from reported_bugs.unseen.third_in_data import balance_of_each_micro_batch
from reported_bugs.unseen.third_in_models import (
    AMP,
    BF16,
    BOTH,
    DRAW,
    FP32,
    KERNEL_2,
    LAYER,
    MOE,
    RATE,
    biased_experts,
    drawn,
    edited,
    norm_kernel,
    transposed,
)
from torch import nn

UPDATE = r"update|beta|\beps\b|optimizer|exp_avg|decay|\blr\b|learning|param|weight|addcdiv|_foreach|mul_|add_|momentum"
MONITORED = ("mix", "monitor")
HORIZON, LATER = 40, DRAW.randint(43, 52)
DECAY, RATE_OF_DECAY = drawn(0.05, 0.2), drawn(1e-3, 4e-3)
STALE = DRAW.choice(("layers.0.attention.o.weight", "layers.1.mlp.gate.weight", "layers.1.attention.v.weight"))
SHUFFLE = DRAW.randint(1000, 9999)


def counted_twice(program: Program) -> None:
    """The norm that clips counts the table that two layers share twice."""

    def clip() -> None:
        grads = [p.grad for p in program.model.parameters()]
        total = torch.stack([g.float().pow(2).sum() for g in (*grads, program.model.head.weight.grad)]).sum().sqrt()
        for grad in grads:
            grad.mul_((program.setting.clip / (total + 1e-6)).clamp(max=1.0).to(grad.dtype))

    program.clip = clip  # type: ignore[method-assign]


def unscaled_twice(program: Program) -> None:
    def clip() -> None:
        program.scaler.unscale_(program.optimizer)
        for p in program.model.parameters():
            p.grad.div_(program.scaler.get_scale())
        nn.utils.clip_grad_norm_(program.model.parameters(), program.setting.clip)

    program.clip = clip  # type: ignore[method-assign]


def no_copies(program: Program) -> None:
    """Weights in 16 bits are moved themselves."""
    program.optimizer = torch.optim.AdamW(list(program.model.parameters()), lr=program.setting.lr)
    program.scheduler = torch.optim.lr_scheduler.LambdaLR(program.optimizer, program.rate)


class OwnAdamW(torch.optim.Optimizer):
    """AdamW, in float32; `corrected`: by the number of the step; `by_rate`: the decay is times the learning rate."""

    def __init__(self, groups: Any, lr: float, corrected: bool, by_rate: bool) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0})
        self.corrected, self.by_rate = corrected, by_rate

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                p.mul_(1 - group["weight_decay"] * (group["lr"] if self.by_rate else 1))
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                rate, scale = group["lr"], 1.0
                if self.corrected:
                    rate, scale = rate / (1 - first ** state["step"]), math.sqrt(1 - second ** state["step"])
                p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().div_(scale).add_(group["eps"]), value=-rate)


def own_adam(name: str, corrected: bool = True, by_rate: bool = True, decay: float = 0.1) -> Plant:
    def plant(program: Program) -> None:
        program.setting = replace(program.setting, decay=decay)
        program.make_optimizer = lambda: OwnAdamW(program.groups(), program.setting.lr, corrected, by_rate)  # type: ignore[method-assign]

    return named(plant, name)


def averaged_twice(program: Program) -> None:
    averages = [p.detach().clone() for p in program.model.parameters()]
    own = program.update

    def update() -> None:
        own()
        with torch.no_grad():
            for _ in range(2):
                for average, p in zip(averages, program.model.parameters()):
                    average.mul_(0.99).add_(p, alpha=1 - 0.99)

    program.update = update  # type: ignore[method-assign]


def one_not_zeroed(program: Program) -> None:
    stale = program.model.get_parameter(STALE)

    def zero_grad(set_to_none: bool = True) -> None:
        for p in program.model.parameters():
            if p is not stale:
                p.grad = None

    program.optimizer.zero_grad = zero_grad


def momentum(nesterov: bool) -> Plant:
    def plant(program: Program) -> None:
        program.make_optimizer = lambda: torch.optim.SGD(program.groups(), lr=0.02, momentum=0.9, nesterov=nesterov)  # type: ignore[method-assign]

    return named(plant, "momentum")


def cosine(horizon: int) -> Plant:
    def plant(program: Program) -> None:
        program.rate = lambda step: 0.5 * (1 + math.cos(math.pi * min(step, horizon) / horizon))  # type: ignore[method-assign]

    return named(plant, "cosine")


def own_shuffle(program: Program) -> None:
    """The second rank draws from another order of the rows: some are read twice, some never."""
    own = program.rows_of

    def rows_of(step: int) -> Any:
        found = own(step)
        order = torch.randperm(program.setting.rows, generator=torch.Generator().manual_seed(SHUFFLE + step))
        return {key: value[order] for key, value in found.items()}

    program.rows_of = rows_of  # type: ignore[method-assign]


def seeded(by_rank: bool) -> Plant:
    return named(when_ready(lambda p: torch.manual_seed(31 + (p.rank if by_rank else 0)) and None), "seeded")


def head_behind_the_wrapper(program: Program) -> None:
    """The head is replaced when the wrapper is there: it is no shard, and its gradients are not summed."""
    head = nn.Linear(*reversed(program.model.head.weight.shape), bias=False)
    nn.init.normal_(head.weight, std=0.02, generator=torch.Generator().manual_seed(4))
    program.model.head = head.to(program.model.head.weight.dtype)
    program.clip = lambda: None  # type: ignore[method-assign]  # a norm over shards and a tensor is refused
    program.optimizer = program.make_optimizer()
    program.scheduler = torch.optim.lr_scheduler.LambdaLR(program.optimizer, program.rate)


def no_decay(program: Program) -> None:
    for group in program.optimizer.param_groups:
        group["weight_decay"] = 0.0


def same_rows(program: Program) -> None:
    own = program.batches

    def batches(step: int) -> Any:
        program.rank, rank = 0, program.rank
        try:
            return own(step)
        finally:
            program.rank = rank

    program.batches = batches  # type: ignore[method-assign]


def watched(setting: Setting, **changes: Any) -> Setting:
    return replace(setting, **{"steps": 32, **changes})


def pair(name: str, setting: Setting, plant: Plant, truth: str, seen: str, **more: Any) -> Fault:
    return Fault(f"two monitors: {name}", watched(setting), plant, truth, seen, **{"levels": ("monitor",), **more})


def single(name: str, setting: Setting, plant: Plant, truth: str, seen: str, levels: tuple[str, ...]) -> Fault:
    return Fault(f"one run: {name}", setting, plant, truth, seen, levels, alone=True)


SAME = r"same|alike|identical|rows|data"
FSDP = replace(BF16, ranks=2, wrap="fsdp")
DDP, DDP_AMP = replace(BF16, ranks=2, wrap="ddp"), replace(AMP, ranks=2, wrap="ddp")
DROPPED = replace(DDP, changes=(("dropout", 0.1),))
TIED = replace(FP32, clip=0.1, changes=(("tied", True),))
CASES = (
    Fault("a shared table counted twice", TIED, when_ready(counted_twice), r"norm|clip|mul|grad|foreach", "param_is_not_shared", BOTH),
    Fault(
        "gradients unscaled twice",
        Setting(dtype="fp16"),
        when_ready(unscaled_twice),
        r"div|unscale|clip|norm|grad|foreach|exp_avg|param|update",
        "unscale_ and a division",
        ("mix", "L0", "monitor"),
    ),
    Fault(
        "no float32 copies", BF16, when_ready(no_copies), UPDATE + r"|copy|float|dtype", "master weights", ("mix", "L0"), golden=copies()
    ),
    Fault("no bias correction", AMP, own_adam("raw", corrected=False), UPDATE, "bias_correction", MONITORED, golden=own_adam("own")),
    Fault(
        "decay not times the rate",
        replace(AMP, lr=RATE_OF_DECAY),
        own_adam("by step", by_rate=False, decay=DECAY * RATE_OF_DECAY * 1.5),
        UPDATE,
        "decoupled decay",
        MONITORED,
        golden=own_adam("own decay", decay=DECAY),
    ),
    Fault("an average made twice", BF16, when_ready(averaged_twice), r"mul_|add_|average|kept", "two callbacks", golden=averaged(0.99)),
    Fault(
        "a gradient not zeroed",
        AMP,
        when_ready(one_not_zeroed),
        STALE.removesuffix(".weight").replace(".", r"\."),
        "zero_grad of a part",
        ("mix", "L0", "monitor"),
    ),
    Fault("momentum of Nesterov off", replace(FP32, lr=0.02), momentum(False), UPDATE, "config", MONITORED, golden=momentum(True)),
    Fault("a rank shuffles otherwise", DDP, second_rank(own_shuffle), DATA + "|token", "sampler seed by rank", ("mix", "L0", "monitor")),
    Fault("masks of dropout alike on ranks", DROPPED, seeded(False), "drop", "seed without the rank", BOTH, golden=seeded(True)),
    pair("horizon of the cosine", AMP, cosine(LATER), r"learning|\blr\b", "max_steps", golden=cosine(HORIZON)),
    pair("a square matrix transposed", BF16, edited("t", transposed(LAYER)), rf"layers\.{LAYER}\.attention\.q", "conversion"),
    pair(
        "expert bias not updated",
        replace(MOE, dtype="amp"),
        biased_experts("biased", updated=False),
        r"mlp|router|expert|bias",
        "AI-Hypercomputer/maxtext#2494",
        golden=biased_experts("biased"),
    ),
    pair(
        "dropout of another rate",
        replace(BF16, changes=(("dropout", 0.1),)),
        named(lambda p: p.configure.append(lambda config: config.update(dropout=RATE)), "rate"),
        r"drop|layers\.0\W",
        "config",
    ),
    pair(
        "kernel of a norm sums one row",
        AMP,
        edited("row", norm_kernel("row", KERNEL_2)),
        KERNEL_2.replace(".", r"\."),
        "a kernel of one's own",
        golden=edited("kernel", norm_kernel()),
    ),
    pair("a rank shuffles otherwise", DDP_AMP, second_rank(own_shuffle), DATA + r"|loss|sample|token|rank", "sampler seed by rank"),
    pair(
        "balance of each micro batch in full",
        replace(MOE, micro=2),
        when_ready(balance_of_each_micro_batch),
        r"router|loss|mlp",
        "NVIDIA-NeMo/Automodel#3359",
    ),
    pair("no float32 copies", BF16, when_ready(no_copies), UPDATE, "master weights", golden=copies()),
    single("all ranks read the same rows", watched(DDP_AMP), when_ready(same_rows), SAME, "no sampler", ("monitor", "watch")),
    single("all ranks read the same rows, dumped", DDP, when_ready(same_rows), SAME, "no sampler", BOTH),
    single(
        "a head behind the wrapper",
        watched(replace(FSDP, dtype="amp")),
        when_ready(head_behind_the_wrapper),
        r"head",
        "module added late",
        ("monitor",),
    ),
    single("a head behind the wrapper, dumped", FSDP, when_ready(head_behind_the_wrapper), r"head|" + REDUCED, "module added late", BOTH),
    single(
        "a rank does not decay",
        watched(replace(DDP_AMP, decay=2.0)),
        second_rank(no_decay),
        r"rank",
        "groups made by hand",
        ("monitor", "watch"),
    ),
)
