"""Reported bugs in data, loss and precision of training loops."""

from __future__ import annotations

from typing import Any

import torch
from reported_bugs.case import Fault, in_model, stuck, when_ready
from reported_bugs.faults.in_models import ALL, AMP, GPT, HF, TWO
from reported_bugs.training import Batch, Program, Setting
from torch import Tensor
from torch.nn import functional as F

MICRO = Setting(micro=2)


def micro_batches_alike(p: Program) -> None:
    def loss(batch: Batch, _tokens: Tensor) -> Tensor:
        with p.precision():
            logits, _ = p.logits(batch)
        return p.criterion(logits, batch["labels"]) / (batch["labels"] != -100).sum() / p.setting.micro

    p.loss = loss  # type: ignore[method-assign]


def not_divided(p: Program) -> None:
    own = p.loss
    p.loss = lambda batch, tokens: own(batch, tokens) * p.setting.micro  # type: ignore[method-assign]


def shifted_twice(p: Program) -> None:
    own = p.criterion
    p.criterion = lambda logits, labels: own(logits[:, :-1], labels[:, 1:])  # type: ignore[method-assign]


def padding_in_loss(p: Program) -> None:
    own = p.criterion
    p.criterion = lambda logits, labels: own(logits, labels.clamp_min(0))  # type: ignore[method-assign]


def loss_of_a_slice(p: Program) -> None:
    own = p.criterion
    p.criterion = lambda logits, labels: own(logits[:, 1:], labels[:, 1:])  # type: ignore[method-assign]


def logits_in_bf16(p: Program) -> None:
    p.criterion = lambda logits, labels: F.cross_entropy(  # type: ignore[method-assign]
        logits.to(torch.bfloat16).view(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100, reduction="sum"
    )


def label_smoothed(p: Program) -> None:
    p.criterion = lambda logits, labels: F.cross_entropy(  # type: ignore[method-assign]
        logits.float().view(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100, reduction="sum", label_smoothing=0.01
    )


def data_again(p: Program) -> None:
    """The second step reads the data of the first, as a restarted loader or a sampler without set_epoch does."""
    own = p.rows_of
    p.rows_of = lambda step: own(max(0, step - 1))  # type: ignore[method-assign]


def first_token_twice(p: Program) -> None:
    own = p.rows_of

    def rows(step: int) -> Batch:
        found = own(step)
        return {**found, "tokens": torch.cat([found["tokens"][:, :1], found["tokens"][:, :-1]], 1)}

    p.rows_of = rows  # type: ignore[method-assign]


def frozen(model: Any) -> None:
    model.layers[1].attention.k.weight.requires_grad_(False)


def before_step(number: int, change: Any) -> Any:
    def plant(p: Program) -> None:
        own = p.step

        def step(at: int) -> Tensor:
            if at == number:
                change(p)
            return own(at)

        p.step = step  # type: ignore[method-assign]

    return when_ready(plant)


def data_from_start(p: Program) -> None:
    own = p.rows_of
    p.rows_of = lambda step: own(step - 2)  # type: ignore[method-assign]


def stale_cast(model: Any) -> None:
    """The cast weight of the first step is used on."""
    down, kept = model.layers[1].mlp.down, []

    def forward(x: Tensor) -> Tensor:
        if not kept:
            kept.append(down.weight.detach().clone())
        return F.linear(x, kept[0] + (down.weight - down.weight.detach()))

    down.forward = forward


def ten_bits(x: Tensor) -> Tensor:
    return (x.detach().view(torch.int32) + 4096 & -8192).view(torch.float32)


class ShortProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return ten_bits(x) @ ten_bits(weight.t().contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, -2).t() @ x.flatten(0, -2)


def short_product(model: Any) -> None:
    down = model.layers[1].mlp.down
    down.forward = lambda x: ShortProduct.apply(x, down.weight)


def element_flipped(p: Program) -> None:
    """One element of one product is off, in step 1."""
    up, count = p.model.layers[1].mlp.up, [0]

    def after(_module: Any, _inputs: Any, output: Tensor) -> None:
        count[0] += 1
        if count[0] == 2:
            stuck(output, 77)

    up.register_forward_hook(after)


def no_gradient_reentrant(p: Program) -> None:
    p.configure.append(lambda config: config.update(checkpoint="reentrant"))


def embedding_frozen(model: Any) -> None:
    model.embedding.weight.requires_grad_(False)


DATA = r"embedding|data|rows_of|Torch\.rand|\.input_0"
HEAD = r"head.*backward|\bloss\b|actv_grad/head|grad_reduced/(head|norm)"
LOSS = r"cross_entropy|in loss|criterion|\bloss\b|__truediv__|\bdiv\b"

CASES = (
    Fault("loss per micro batch", MICRO, when_ready(micro_batches_alike), LOSS, f"{HF}#34191", (*ALL, "monitor"), coarse=HEAD),
    Fault(
        "loss not divided by micro batches",
        MICRO,
        when_ready(not_divided),
        LOSS + "|__mul__",
        f"{HF}#37766, karpathy/nanoGPT#206",
        (*ALL, "monitor"),
        coarse=HEAD,
    ),
    Fault(
        "labels shifted twice",
        GPT,
        when_ready(shifted_twice),
        LOSS + "|getitem|slice",
        "labels shifted by the data and the model",
        (*ALL, "monitor"),
        coarse=HEAD,
    ),
    Fault("padding in the loss", GPT, when_ready(padding_in_loss), LOSS + "|clamp", "pad token for -100", (*ALL, "monitor"), coarse=HEAD),
    Fault("loss of a slice", GPT, when_ready(loss_of_a_slice), LOSS + "|getitem", "first token left out", TWO, coarse=HEAD),
    Fault("logits not upcast", GPT, when_ready(logits_in_bf16), LOSS + r"|Tensor\.(float|to|bfloat16)", f"{HF}#29285", ALL, coarse=HEAD),
    Fault("labels smoothed", GPT, when_ready(label_smoothed), LOSS, "default label_smoothing", TWO, coarse=HEAD),
    Fault("data of the step before", GPT, when_ready(data_again), DATA, "sampler without set_epoch", (*ALL, "monitor"), 1),
    Fault("first token twice", GPT, when_ready(first_token_twice), r"embedding|data|Torch\.cat", "two BOS tokens", TWO),
    Fault("a weight frozen", GPT, in_model(frozen), r"layers\.1\.attention\.k", "requires_grad", (*ALL, "monitor")),
    Fault("resumed with the data reset", GPT, before_step(2, data_from_start), DATA, "loader restarted", TWO, 2),
    Fault(
        "stale cast of a weight",
        AMP,
        in_model(stale_cast),
        r"layers\.1\.mlp\.down|linear\.13\.|__add__",
        "autocast cache, NVIDIA/apex#132",
        ALL,
    ),
    Fault(
        "ten bits in one product",
        Setting(dtype="fp32"),
        in_model(short_product),
        r"layers\.1\.mlp\.down|ShortProduct",
        "TF32 in one kernel",
        ALL,
    ),
    Fault(
        "an element flipped",
        GPT,
        when_ready(element_flipped),
        r"layers\.1\.mlp|linear\.\d+\.forward|silu|__mul__",
        "silent data corruption",
        ALL,
        1,
    ),
    Fault(
        "an element flipped, fp32",
        Setting(dtype="fp32"),
        when_ready(element_flipped),
        r"layers\.1\.mlp|linear\.\d+\.forward|silu|__mul__",
        "silent data corruption",
        ("mix", "md5"),
        1,
    ),
    Fault(
        "frozen embedding under recomputation",
        Setting(changes=(("checkpoint", "new"),)),
        lambda p: (no_gradient_reentrant(p), in_model(embedding_frozen)(p))[0],
        r"layers\.[01]|checkpoint|embedding|requires",
        f"{HF} enable_input_require_grads",
        ALL,
    ),
)
