"""Bugs that people reported of DDP, FSDP2, DeepSpeed, tensor and context parallelism in plain torch, written down before the verdict
engine and the other lists were read; the size of each was drawn at random. They were run once before anything was changed for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs import models
from reported_bugs.case import Fault, Plant, every, in_model, when_ready
from reported_bugs.faults.in_data import before_step
from reported_bugs.faults.in_deepspeed import DDP_FP32, ZERO1, ZERO2, ZERO3, ZERO3_FP32
from reported_bugs.training import Batch, Program, Setting
from reported_bugs.unseen.fourth_plants import BOTH, DRAW, EVERY, LAYER, UPDATE, drawn, some
from reported_bugs.unseen.second import named
from torch import Tensor

FSDP, DDP = Setting(ranks=2, wrap="fsdp"), Setting(ranks=2, wrap="ddp")
ONE, TWO = Setting(clip=0.0), Setting(ranks=2, clip=0.0)
LONG = {"steps": 24, "dtype": "amp"}
STD, HALF, STEP = drawn(1.5, 3.0), drawn(0.4, 0.7), DRAW.randint(7, 15)


def whole_rows(p: Program) -> None:
    """Every rank has all rows of a step."""
    s = p.setting
    size = s.rows // s.micro

    def batches(step: int) -> list[Batch]:
        whole = p.rows_of(step)
        return [{key: value[m * size : (m + 1) * size].contiguous() for key, value in whole.items()} for m in range(s.micro)]

    p.batches = batches  # type: ignore[method-assign]
    p.tokens = lambda micros: torch.stack([(b["labels"] != -100).sum() for b in micros]).sum()  # type: ignore[method-assign]


# ---- tensor parallelism of torch --------------------------------------------------------------------------------------------


def tensor_parallel(change: Any = None, name: str = "tensor parallel") -> Plant:
    """The MLPs are cut over two ranks; `change` edits the model behind that. One process does nothing of it."""

    def plant(p: Program) -> None:
        if p.setting.ranks == 1:
            return
        whole_rows(p)
        own = p.wrap

        def wrap() -> None:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            for number, layer in enumerate(p.layers()):
                parallelize_module(layer.mlp, mesh, plan)
                if change and number == LAYER:
                    change(layer.mlp)
            own()

        p.wrap = wrap  # type: ignore[method-assign]

    return named(plant, name)


def other_order(mlp: Any) -> None:
    """One of two matrices that go together is read in the order of another mesh."""
    shard = mlp.gate.weight.to_local()
    parts = [torch.empty_like(shard.data) for _ in range(2)]
    dist.all_gather(parts, shard.data.contiguous())
    shard.data.copy_(parts[1 - dist.get_rank()])


def mean_for_sum(mlp: Any) -> None:
    mlp.down.register_forward_hook(lambda _m, _given, out: out / 2)


# ---- context parallelism: each rank has two pieces of every sequence --------------------------------------------------------


class Gather(torch.autograd.Function):
    """Keys or values of all ranks, with the sum of their gradients."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(2, 2)[dist.get_rank()]


class Cut(torch.autograd.Function):
    """The same without: a rank has the gradient of its own queries only."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return Gather.forward(_ctx, x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.chunk(2, 2)[dist.get_rank()]


def pieces(rank: int, ranks: int) -> Tensor:
    """Places of a rank: the first and the last quarter, or those between."""
    quarters = torch.arange(models.LENGTH).chunk(4)
    return torch.cat([quarters[rank], quarters[3 - rank]]) if ranks == 2 else torch.arange(models.LENGTH)


def context_parallel(gather: Any = Gather, positions: str = "own", borders: bool = True, name: str = "context parallel") -> Plant:
    """Masks come with the data. One process has all pieces."""

    def plant(p: Program) -> None:
        ranks, whole, attend = p.setting.ranks, Program.rows_of, models.attend
        place, keys = pieces(p.rank, ranks), torch.cat([pieces(rank, ranks) for rank in range(ranks)])

        def batches(step: int) -> list[Batch]:
            batch = whole(p, step)
            part = {key: value[:, place].contiguous() for key, value in batch.items()}
            if positions == "counted":
                part["positions"] = torch.arange(len(place))[None].expand(len(part["tokens"]), -1).contiguous() + p.rank * len(place)
            if not borders:
                part["labels"][:, [len(place) // 2 - 1, -1]] = -100
            seen = (place[:, None] >= keys[None]) & batch["mask"][:, None, keys].bool()
            return [{**part, "allowed": (seen | (place[:, None] == keys[None]))[:, None]}]

        def attend_all(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, fused: bool) -> Tensor:
            return attend(q, gather.apply(k), gather.apply(v), allowed, scale, fused)

        p.batches = batches  # type: ignore[method-assign]
        if ranks > 1:
            models.attend = attend_all
        p.change_model.append(lambda model: setattr(model, "allowed", lambda batch: batch["allowed"]))

    return named(plant, name)


# ---- FSDP2, DDP, DeepSpeed --------------------------------------------------------------------------------------------------


def divided_once(p: Program) -> None:
    """One group of parameters is not divided by the number of ranks."""
    own = p.clip

    def clip() -> None:
        for q in p.layers()[LAYER].parameters():
            q.grad.mul_(p.setting.ranks)
        own()

    p.clip = clip  # type: ignore[method-assign]


def norms_ignored(p: Program) -> None:
    """Norms are left out of the shards, and nobody sums their gradients."""

    def wrap() -> None:
        from torch.distributed import fsdp

        own = fsdp.fully_shard
        norms = {q for module in every(p.model, models.RMSNorm) for q in module.parameters()}
        fsdp.fully_shard = lambda module: own(module, ignored_params=norms)
        try:
            Program.wrap(p)
        finally:
            fsdp.fully_shard = own

    p.wrap = wrap  # type: ignore[method-assign]
    p.clip = lambda: None  # type: ignore[method-assign]


def no_clip(p: Program) -> None:
    p.clip = lambda: None  # type: ignore[method-assign]


def shards_exchanged(p: Program) -> None:
    """A file of shards is read by the other rank."""
    shard = p.layers()[LAYER].attention.q.weight.to_local()
    parts = [torch.empty_like(shard.data) for _ in range(2)]
    dist.all_gather(parts, shard.data.contiguous())
    shard.data.copy_(parts[1 - dist.get_rank()])


def smaller_start(model: Any) -> None:
    """What a model does to its weights behind their creation; lost where they are sharded already."""
    model.layers[LAYER].attention.o.weight.data.mul_(STD)


def copy_one_late(p: Program) -> None:
    """What comes back from the host is the weight of the last step."""
    weight, own = p.model.layers[LAYER].mlp.up.weight, p.update
    kept = [weight.detach().clone()]

    def update() -> None:
        own()
        now = weight.detach().clone()
        weight.data.copy_(kept[0])
        kept[0] = now

    p.update = update  # type: ignore[method-assign]


def every_other_step(p: Program) -> None:
    """The gradient of one weight is lost in every other step."""
    count = [0]

    def hook(grad: Tensor) -> Tensor:
        count[0] += 1
        return grad * 0 if count[0] % 2 == 0 else grad

    p.model.layers[LAYER].attention.k.weight.register_hook(hook)


def own_mean(p: Any) -> None:
    """A rank divides by its own tokens."""

    def tokens(micros: list[Batch]) -> Tensor:
        return torch.stack([(b["labels"] != -100).sum() for b in micros]).sum() * p.setting.ranks

    p.tokens = tokens


def warmed_again(p: Program) -> None:
    own = p.rate
    p.rate = lambda step: own(step) * (1.0 if step < STEP else min(1.0, (step - STEP + 1) / 5))  # type: ignore[method-assign]


def counted_from_zero(p: Program) -> None:
    """Moments come back from a checkpoint; the number of steps does not."""
    for state in p.optimizer.state.values():
        state["step"].zero_()


def no_decay_any_more(p: Program) -> None:
    for group in p.optimizer.param_groups:
        group["weight_decay"] = 0.0


def one_layer_left_out(p: Program) -> None:
    """The groups of the optimizer are made by a pattern of names that one layer does not match."""
    own = p.groups

    def groups() -> list[dict[str, Any]]:
        gone = {id(q) for name, q in p.model.named_parameters() if name.startswith(f"layers.{LAYER}.mlp")}
        return [{**g, "params": [q for q in g["params"] if id(q) not in gone]} for g in own()]

    p.groups = groups  # type: ignore[method-assign]


def pair(name: str, setting: Setting, plant: Plant, truth: str, seen: str, levels: tuple[str, ...] = BOTH, **more: Any) -> Fault:
    return Fault(f"reported: {name}", setting, plant, truth, seen, some(levels), **more)


def across(name: str, setting: Setting, other: Setting, plant: Plant, truth: str, seen: str, levels: Any = BOTH, **more: Any) -> Fault:
    return Fault(f"reported: {name}, other layout", setting, plant, truth, seen, some(levels), other=other, **more)


MLP = rf"layers\.{LAYER}\.mlp"
ATTENTION = r"layers\.\d\.attention|\.k\b|\.v\b|\bk\.|\bv\.|gather"
CONTEXT = context_parallel()
CASES = (
    across("tp: order of the shards", ONE, TWO, tensor_parallel(other_order), MLP, "pytorch device mesh order"),
    across("tp: mean for sum", replace(ONE, dtype="amp"), replace(TWO, dtype="amp"), tensor_parallel(mean_for_sum), MLP, "Partial(avg)"),
    pair("tp: mean for sum", TWO, tensor_parallel(mean_for_sum), MLP, "Partial(avg)", golden=tensor_parallel()),
    pair(
        "cp: keys gathered without gradient",
        DDP,
        context_parallel(Cut),
        ATTENTION,
        "all_gather for all_gather with autograd",
        golden=CONTEXT,
    ),
    across(
        "cp: keys gathered without gradient",
        Setting(dtype="amp"),
        replace(DDP, dtype="amp"),
        context_parallel(Cut),
        ATTENTION,
        "all_gather for all_gather with autograd",
        golden=CONTEXT,
    ),
    pair("cp: positions of another order", DDP, context_parallel(positions="counted"), r"rotary|position", "zigzag", golden=CONTEXT),
    across(
        "cp: positions of another order",
        Setting(),
        DDP,
        context_parallel(positions="counted"),
        r"rotary|position|cos|sin",
        "zigzag",
        golden=CONTEXT,
    ),
    pair(
        "cp: labels lost at borders",
        DDP,
        context_parallel(borders=False),
        r"loss|cross_entropy|label|head|tokens|criterion",
        "shift after the cut",
        golden=CONTEXT,
        coarse=r"GPT\.backward|head|loss",
    ),
    pair(
        "fsdp: a layer not divided by the ranks",
        FSDP,
        when_ready(divided_once),
        rf"layers\.{LAYER}\.|reduce",
        "set_gradient_divide_factor",
        EVERY,
    ),
    across(
        "fsdp: a layer not divided by the ranks",
        replace(DDP, dtype="fp32"),
        replace(FSDP, dtype="fp32"),
        when_ready(divided_once),
        rf"layers\.{LAYER}\.|reduce",
        "set_gradient_divide_factor",
        EVERY,
    ),
    pair("fsdp: norms not summed", FSDP, norms_ignored, r"norm|reduce|all_reduce", "ignored_params", EVERY, golden=no_clip),
    Fault(
        "reported: fsdp: norms not summed, alone",
        replace(FSDP, steps=6, dtype="amp"),
        norms_ignored,
        "norm",
        "ignored_params",
        some(EVERY),
        alone=True,
    ),
    across(
        "fsdp: shards exchanged",
        Setting(),
        FSDP,
        when_ready(shards_exchanged),
        rf"layers\.{LAYER}\.attention",
        "sharded state dict",
        EVERY,
    ),
    across(
        "zero 3: weights as they were created",
        replace(ZERO1, lr=1e-3),
        replace(ZERO3, lr=1e-3),
        lambda _p: None,
        rf"layers\.{LAYER}\.attention\.o",
        "GatheredParameters without modifier_rank",
        ("L0", "monitor"),
        golden=named(in_model(smaller_start), "smaller start"),
    ),
    pair("zero 2: a weight comes back one step late", ZERO2, when_ready(copy_one_late), MLP + r"\.up|copy_", "offload", EVERY),
    pair(
        "zero 2: a gradient lost every other step",
        replace(ZERO2, steps=24),
        when_ready(every_other_step),
        rf"layers\.{LAYER}\.attention\.k",
        "deepspeedai/DeepSpeed#7718",
        ("monitor",),
    ),
    across(
        "zero 3: a mean of each rank",
        DDP_FP32,
        ZERO3_FP32,
        when_ready(own_mean),
        r"loss|head|grad|GPT",
        "AReaL#335",
        ("L0", "monitor"),
    ),
    pair(
        "warmed up again", Setting(**LONG, warmup=4), warmed_again, r"learning|\blr\b", "resumed schedule", ("monitor", "watch"), step=STEP
    ),
    pair(
        "steps of the optimizer from zero",
        replace(FSDP, **LONG),
        before_step(STEP, counted_from_zero),
        r"step|update|optimizer|exp_avg|beta|param",
        "state without step",
        ("monitor",),
        step=STEP,
    ),
    pair(
        "weight decay lost on the way",
        replace(DDP, **LONG),
        before_step(STEP, no_decay_any_more),
        r"decay|optimizer|update|param",
        "groups rebuilt",
        ("monitor", "watch"),
        step=STEP,
    ),
    pair(
        "a layer left out of the optimizer",
        replace(FSDP, steps=4),
        one_layer_left_out,
        MLP + "|" + UPDATE,
        "pattern of names",
        EVERY,
    ),
)
