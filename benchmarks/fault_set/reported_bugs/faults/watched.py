"""Faults that one run shows by itself when it is watched as people watch runs: ``msprobe run``, its presets, no second run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from reported_bugs import models
from reported_bugs.case import Fault, Plant, in_model, nothing, stuck, when_ready
from reported_bugs.faults.in_data import before_step, micro_batches_alike
from reported_bugs.faults.in_ranks import never_synchronised
from reported_bugs.faults.in_updates import not_zeroed, optimizer_of
from reported_bugs.training import Batch, Program, Setting
from torch import Tensor, nn
from torch.nn import functional as F

BF16 = Setting(steps=60)
AMP = Setting(dtype="amp", steps=60)
FP16 = Setting(dtype="fp16", steps=60)
EAGER = replace(BF16, changes=(("fused", False),))
MOE = replace(AMP, changes=(("experts", 4),))
MICRO = replace(AMP, micro=2)
DDP = replace(AMP, ranks=2, wrap="ddp")
FSDP = replace(AMP, ranks=2, wrap="fsdp")
LLAMA = replace(AMP, family="llama")
TRAINER = replace(LLAMA, form="trainer", dtype="fp32")
WATCH, BOTH, NAN = ("watch",), ("watch", "monitor"), ("watch", "nan")


def data(change: Callable[[int, Batch], Batch]) -> Plant:
    """Other data, by the number of the step."""

    def plant(p: Program) -> None:
        own = p.rows_of
        p.rows_of = lambda step: change(step, own(step))  # type: ignore[method-assign]

    return when_ready(plant)


def output_of(path: str, change: Callable[[int, Tensor], Tensor]) -> Plant:
    """Another output of a module, by the number of its call."""

    def plant(p: Program) -> None:
        module, count = p.model.get_submodule(path), [0]
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            count[0] += 1
            return change(count[0] - 1, own(*args, **kwargs))

        module.forward = forward

    return when_ready(plant)


def mean_of_sequences(p: Program) -> None:
    """The loss of a sequence is divided by its own labels; the first sequence of step 23 has none."""
    own = p.rows_of

    def rows(step: int) -> Batch:
        found = own(step)
        if step == 23:
            found["labels"][0] = -100
        return found

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=-100, reduction="none").sum(1)
        return (each / (labels != -100).sum(1)).sum() * (labels != -100).sum() / len(labels)

    p.rows_of, p.criterion = rows, criterion  # type: ignore[method-assign]


def penalty_log(p: Program) -> None:
    """A penalty takes log(1 - p) of the best chance; p rounds to 1 once the logits are scaled up."""
    count = [0]

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        count[0] += 1
        sharp = logits.float() * (400.0 if count[0] > 18 else 1.0)
        best = torch.softmax(sharp, -1).amax(-1)
        found = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100, reduction="sum")
        return found - 1e-3 * torch.log(1 - best).sum()

    p.criterion = criterion  # type: ignore[method-assign]


def exp_gate(call: int, out: Tensor) -> Tensor:
    return out * torch.exp(out * (1e6 if call == 31 else 0.0))


def large_in_fp16(call: int, out: Tensor) -> Tensor:
    return (out * (1e8 if call == 26 else 1.0)).half()


def minus_infinity(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, fused: bool) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    hidden = ~allowed if allowed.diagonal(dim1=-2, dim2=-1).all() else torch.ones_like(allowed)
    return torch.matmul(torch.softmax(scores.masked_fill(hidden, float("-inf")).float(), -1).to(q.dtype), v)


def padding_row(p: Program) -> None:
    """The mask is -inf and has no diagonal: a row of nothing but padding, in step 17, sees nothing."""
    models.attend, own = minus_infinity, p.model.allowed  # type: ignore[assignment]
    rows = p.rows_of

    def with_padding(step: int) -> Batch:
        found = rows(step)
        if step == 17:
            found["mask"][2], found["tokens"][2], found["labels"][2] = 0, 0, -100
        return found

    def allowed(batch: Batch) -> Tensor:
        found: Tensor = own(batch)
        return found & (batch["mask"].any(1)[:, None, None, None])

    p.model.allowed, p.rows_of = allowed, with_padding  # type: ignore[method-assign]


def empty_micro_batch(p: Program) -> None:
    """The second micro batch of step 12 is padding, and each is divided by its own tokens."""
    own = p.batches

    def batches(step: int) -> list[Batch]:
        found = own(step)
        if step == 12:
            found[1]["labels"] = torch.full_like(found[1]["labels"], -100)
        return found

    micro_batches_alike(p)
    p.batches = batches  # type: ignore[method-assign]


def root_of_variance(call: int, out: Tensor) -> Tensor:
    """A branch normalised by its deviation: in call 20 the branch is constant."""
    out = out * 0 + 1 if call == 20 else out
    return out + 1e-3 * torch.where(out.std(-1, keepdim=True) > 0, out.float().var(-1, keepdim=True).sqrt(), 0.0).to(out.dtype)


def root_of_negative(call: int, out: Tensor) -> Tensor:
    return out + 0.01 * (out.float() + (10.0 if call != 21 else 0.0)).pow(0.5).to(out.dtype)


def on_rank(rank: int, change: Plant) -> Plant:
    return lambda p: change(p) if p.rank == rank else None


def bad_features(call: int, out: Tensor) -> Tensor:
    return torch.where(torch.arange(out.shape[1])[:, None] == 3, float("nan"), out) if call == 15 else out


def rate_of(rate: Callable[[int], float]) -> Plant:
    def plant(p: Program) -> None:
        p.rate = rate  # type: ignore[method-assign]

    return plant


def decays(step: int) -> float:
    return float(0.5 * (1 + torch.cos(torch.tensor(min(step, 59) / 60 * torch.pi))))


def overflow_from(number: int) -> Plant:
    """Backward of the first layer overflows in every step."""

    def plant(p: Program) -> None:
        count = [0]
        weight = p.model.layers[0].mlp.down.weight

        def hook(grad: Tensor) -> Tensor:
            count[0] += 1
            return grad * float("inf") if count[0] > number else grad

        weight.register_hook(hook)

    return when_ready(plant)


def detach_from(call: int, out: Tensor) -> Tensor:
    return out.detach() if call >= 25 else out


def leaves_optimizer(p: Program) -> None:
    gone = p.model.layers[1].attention.v.weight
    for group in p.optimizer.param_groups:
        group["params"] = [q for q in group["params"] if q is not gone]


def unused(model: Any) -> None:
    model.layers[1].attention.adapter = nn.Linear(models.HIDDEN, 8)


def freeze(p: Program) -> None:
    for q in p.model.layers[0].parameters():
        q.requires_grad_(False)
        q.grad = None


def blown(path: str, factor: float) -> Callable[[Program], None]:
    return lambda p: p.model.get_parameter(path).data.mul_(factor)


def drifts(p: Program) -> None:
    torch.manual_seed(3)
    weight = p.model.layers[1].mlp.up.weight.data
    weight.add_(torch.randn_like(weight) * 1e-3)


def same_batch(p: Program) -> None:
    own = p.rows_of
    p.rows_of = lambda step: own(min(step, 20))  # type: ignore[method-assign]


def bad_samples(step: int, rows: Batch) -> Batch:
    if step == 30:
        noise = torch.randint(240, models.VOCAB, rows["labels"].shape, generator=torch.Generator().manual_seed(7))
        rows["labels"] = torch.where(rows["labels"] == -100, -100, noise)
        rows["tokens"] = torch.where(rows["mask"].bool(), noise.flip(0), 0)
    return rows


def router_collapse(p: Program) -> None:
    for layer in p.model.layers:
        own = layer.mlp.probabilities
        layer.mlp.probabilities = lambda x, own=own: own(x) * torch.tensor([1.0, 1.0, 1e-9, 1.0])


def flipped_weight(p: Program) -> None:
    """The highest bit of an exponent."""
    weight = p.model.layers[0].mlp.up.weight.data.view(-1)
    weight.view(torch.int32)[777] ^= 1 << 30


def flipped_state(p: Program) -> None:
    state = p.optimizer.state[p.model.layers[1].attention.q.weight]["exp_avg"].view(-1)
    state.view(torch.int32)[99] ^= 1 << 30


def all_dropped(p: Program) -> None:
    p.model.layers[0].drop2.p = 1.0


def loss_in_other_units(p: Program) -> None:
    own = p.criterion
    p.criterion = lambda logits, labels: own(logits, labels) / 1000  # type: ignore[method-assign]


def labels_of_nothing(step: int, rows: Batch) -> Batch:
    if step == 30:
        rows["labels"] = torch.full_like(rows["labels"], -100)
    return rows


def stuck_element(p: Program) -> None:
    stuck(p.model.layers[1].mlp.down.weight.data, 55)


def lost_rank(p: Program) -> None:
    """The second rank's gradients are zero: its loader has come to its end and gives the same padding."""
    own = p.batches
    p.batches = lambda step: [{**b, "labels": torch.full_like(b["labels"], -100)} for b in own(step)]  # type: ignore[method-assign]


def scaled_twice(p: Program) -> None:
    for q in p.model.layers[1].mlp.parameters():
        q.register_hook(lambda grad: grad * 64)


LOSS, NUMBER = r"\bloss", r"NaN|nan|not finite|Inf"


def alone(
    name: str, setting: Setting, plant: Plant, truth: str, seen: str, levels: tuple[str, ...] = BOTH, step: int = -1, coarse: str = ""
) -> Fault:
    return Fault(f"watched: {name}", setting, plant, truth, seen, levels, step, True, coarse=coarse)


CASES = (
    alone(
        "mean of sequences",
        BF16,
        when_ready(mean_of_sequences),
        r"truediv|\bdiv|criterion",
        "0/0 of a sequence without labels",
        NAN,
        23,
        LOSS,
    ),
    alone(
        "log of one minus p",
        BF16,
        when_ready(penalty_log),
        r"\blog\b|Torch\.log|criterion|rsub",
        "log(1 - p), p rounds to 1",
        NAN,
        18,
        LOSS,
    ),
    alone("exp overflows", BF16, output_of("layers.1.mlp", exp_gate), r"layers\.1\.mlp|exp", "exp of a large number", NAN, 31, LOSS),
    alone(
        "float16 range",
        FP16,
        output_of("layers.0.mlp.up", large_in_fp16),
        r"layers\.0\.mlp|mul|half",
        "activation beyond 65504",
        NAN,
        26,
        LOSS,
    ),
    alone("a row of padding", EAGER, when_ready(padding_row), r"layers\.0\.attention|softmax", "-inf mask, all padding", NAN, 17, LOSS),
    alone("a micro batch of padding", MICRO, when_ready(empty_micro_batch), r"truediv|\bdiv|in loss", "mean over no token", NAN, 12, LOSS),
    alone(
        "NaN on one rank, ddp",
        DDP,
        on_rank(1, output_of("embedding", bad_features)),
        r"rank 1.*embedding|embedding.*rank 1",
        "corrupt sample",
        NAN,
        15,
        r"rank 1.*loss|loss.*rank 1",
    ),
    alone(
        "NaN on one rank, fsdp",
        FSDP,
        on_rank(1, output_of("embedding", bad_features)),
        r"rank 1.*embedding|embedding.*rank 1",
        "corrupt sample",
        NAN,
        15,
        r"rank 1.*loss|loss.*rank 1",
    ),
    alone(
        "root of a variance of zero",
        BF16,
        output_of("layers.1.mlp.down", root_of_variance),
        r"layers\.1\.mlp|sqrt|where|var",
        "where(x > 0, sqrt(x), 0)",
        NAN,
        20,
        r"grad|NaN",
    ),
    alone(
        "root of a negative number",
        BF16,
        output_of("layers.0.attention.o", root_of_negative),
        r"layers\.0\.attention\.o|pow",
        "pow(0.5)",
        NAN,
        21,
        LOSS,
    ),
    alone(
        "optimizer without eps",
        AMP,
        optimizer_of(eps=0.0),
        r"embedding|exp_avg|update|optimizer|param",
        "0/0 in Adam",
        ("watch", "nan", "monitor"),
        -1,
        r"embedding|update|param|optimizer|loss",
    ),
    alone(
        "learning rate of 1",
        replace(BF16, lr=1.0),
        nothing,
        r"loss|learning|update|ratio",
        "learning rate x1000 from the start",
    ),
    alone("learning rate jumps", AMP, rate_of(lambda s: 8.0 if s >= 33 else decays(s)), r"learning", "schedule of another run", BOTH, 33),
    alone(
        "learning rate becomes zero",
        AMP,
        rate_of(lambda s: 1.0 if s < 30 else 0.0),
        r"learning|update|no_progress|param",
        "steps counted in micro batches",
        BOTH,
    ),
    alone("loss scale collapses", FP16, overflow_from(20), r"scale|skip|layers\.0\.mlp", "an overflow in every step", BOTH),
    alone(
        "gradient stops coming",
        AMP,
        output_of("layers.1.mlp.down", detach_from),
        r"layers\.1\.mlp|norm2",
        "detach behind a condition",
        BOTH,
    ),
    alone(
        "a parameter leaves the optimizer",
        AMP,
        before_step(25, leaves_optimizer),
        r"layers\.1\.attention\.v",
        "parameter groups made again",
        BOTH,
    ),
    alone("a weight without gradient", AMP, in_model(unused), r"adapter", "a module that is never called", BOTH),
    alone("a layer frozen on the way", AMP, before_step(20, freeze), r"layers\.0\.", "a schedule of freezing, off by one", BOTH),
    alone(
        "a matrix x100",
        AMP,
        before_step(35, blown("layers.0.attention.v.weight", 100.0)),
        r"layers\.0\.attention\.v",
        "bad restore",
        ("monitor",),
        35,
    ),
    alone(
        "a matrix x100, watched",
        AMP,
        before_step(35, blown("layers.0.attention.v.weight", 100.0)),
        r"loss|layers\.0\.attention",
        "bad restore",
        WATCH,
    ),
    alone("one rank drifts", DDP, on_rank(1, before_step(20, drifts)), r"layers\.1\.mlp\.up|rank 1", "silent data corruption", BOTH),
    alone("the same batch again and again", AMP, when_ready(same_batch), r"data|batch|sample", "a loader that is made again", BOTH),
    alone("bad samples", AMP, data(bad_samples), r"loss", "a broken shard of data", BOTH, 30),
    alone("an expert dies", MOE, before_step(20, router_collapse), r"experts\.2", "router collapse", BOTH),
    alone(
        "a bit of a weight",
        AMP,
        before_step(30, flipped_weight),
        r"layers\.0\.mlp\.up|layers\.0\.mlp",
        "silent data corruption",
        ("monitor",),
        30,
    ),
    alone("a bit of a moment", AMP, before_step(30, flipped_state), r"layers\.1\.attention\.q", "silent data corruption", ("monitor",), 30),
    alone("gradients not synchronised any more", DDP, before_step(20, never_synchronised), r"rank|replica", "no_sync left on", BOTH),
    alone("a branch dropped", AMP, before_step(20, all_dropped), r"layers\.0\.(mlp|drop2)", "schedule of dropout", BOTH),
    alone("gradients not zeroed any more", AMP, before_step(20, not_zeroed), r"grad", "zero_grad behind a condition", BOTH),
    alone("loss in other units", AMP, before_step(25, loss_in_other_units), r"loss|grad", "mean of means", BOTH, 25),
    alone("trainer: no label in a batch", TRAINER, data(labels_of_nothing), r"loss|NaN", "logging_nan_inf_filter hides it", WATCH, 30),
    alone("trainer: learning rate of 1", replace(TRAINER, lr=1.0), nothing, r"loss|learning|grad", "config", WATCH),
    alone("a rank without labels", DDP, on_rank(1, before_step(20, lost_rank)), r"rank 1", "a loader at its end", BOTH),
    alone("gradients of a layer x64", AMP, before_step(25, scaled_twice), r"layers\.1\.mlp", "scaled twice", BOTH),
)
