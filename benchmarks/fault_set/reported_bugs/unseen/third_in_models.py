"""Bugs in models, losses and kernels, written down from reports before the verdict engine and the other lists were read; the size of each
was drawn at random. They were run once before anything was changed for them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs import models
from reported_bugs.case import Fault, Plant, every
from reported_bugs.training import Program, Setting
from reported_bugs.unseen.second import named
from torch import Tensor
from torch.nn import functional as F

DRAW = random.Random(73)
BF16, FP32, AMP = Setting(), Setting(dtype="fp32"), Setting(dtype="amp")
MOE = Setting(changes=(("experts", 4),))
PACKED = Setting(packed=True)
BOTH, THREE = ("mix", "L0"), ("mix", "L1", "L0")


def drawn(low: float, high: float) -> float:
    return round(DRAW.uniform(low, high), 3)


def edited(name: str, edit: Any) -> Plant:
    """A change of the model that a golden run may have, too: such runs are known by its name."""
    return named(lambda program: program.change_model.append(edit), name)


def over(module: Any, change: Any) -> None:
    """`change` makes the new forward pass of a module out of its own."""
    module.forward = change(module.forward)


def biased_experts(name: str, weighted: bool = False, updated: bool = True, reduced: bool = True) -> Plant:
    """Experts are chosen by their chance and a bias that follows the load; `weighted`: the bias is in the weights, too."""

    def edit(model: Any) -> None:
        generator = torch.Generator().manual_seed(9)
        for mixture in every(model, "Experts"):
            mixture.register_buffer("bias", torch.rand(models.EXPERTS, generator=generator) * 0.1)

            def chosen(probabilities: Tensor, mixture: Any = mixture) -> tuple[Tensor, Tensor]:
                _, experts = (probabilities + mixture.bias).topk(mixture.top, -1)
                weights = (probabilities + mixture.bias if weighted else probabilities).gather(-1, experts)
                mixture.load = F.one_hot(experts, models.EXPERTS).float().sum((0, 1))
                return weights / weights.sum(-1, keepdim=True), experts

            mixture.chosen = chosen

    def finish(program: Program) -> None:
        own = program.update

        def update() -> None:
            own()
            for mixture in every(program.model, "Experts"):
                load = mixture.load.clone()
                if reduced and program.setting.ranks > 1:
                    dist.all_reduce(load)
                if updated:
                    mixture.bias.add_(0.02 * torch.sign(load.mean() - load))

        program.update = update  # type: ignore[method-assign]

    def plant(program: Program) -> None:
        program.change_model.append(edit)
        program.ready.append(finish)

    return named(plant, name)


def scaled_experts(model: Any) -> None:
    for mixture in every(model, "Experts"):
        over(mixture, lambda own: lambda x: own(x) * ROUTED)


def capped(model: Any) -> None:
    over(model, lambda own: lambda batch: CAP * torch.tanh(own(batch) / CAP))


def windowed(number: int) -> Any:
    """The layer of this number sees the last few tokens only."""

    def edit(model: Any) -> None:
        place = torch.arange(models.LENGTH)
        near = (place[:, None] - place[None] < WINDOW)[None, None]
        over(model.layers[number], lambda own: lambda x, turn, allowed: own(x, turn, allowed & near))

    return edit


def other_base(model: Any) -> None:
    """The second layer turns by a base of its own."""
    model.rotary2 = models.Rotary(models.HIDDEN // models.HEADS, BASE)
    model.places, own = None, model.rotary.forward

    def remember(x: Tensor, positions: Tensor) -> Any:
        model.places = positions
        return own(x, positions)

    model.rotary.forward = remember
    over(model.layers[1], lambda own: lambda x, turn, allowed: own(x, model.rotary2(x, model.places), allowed))


def partly_turned(model: Any) -> None:
    half = len(model.rotary.inverse) // 2
    model.rotary.inverse[half:] = 0


def norm_of_all_heads(model: Any) -> None:
    for layer in model.layers:
        norm = layer.attention.q_norm

        def forward(x: Tensor, norm: Any = norm) -> Tensor:
            wide = x.float()
            return norm.weight * (wide * torch.rsqrt(wide.pow(2).mean((-1, -2), keepdim=True) + norm.eps)).to(x.dtype)

        norm.forward = forward


def residuals(branches: tuple[str, ...]) -> Any:
    def edit(model: Any) -> None:
        for layer in model.layers:
            for branch in branches:
                over(getattr(layer, branch), lambda own: lambda *given: own(*given) * RESIDUAL)

    return edit


def transposed(number: int) -> Any:
    def edit(model: Any) -> None:
        weight = model.layers[number].attention.q.weight
        weight.data = weight.data.t().contiguous()

    return edit


def loaded_norms(left: str) -> Any:
    """Norms have weights of a checkpoint; `left`: the one that was not in it."""

    def edit(model: Any) -> None:
        generator = torch.Generator().manual_seed(21)
        for name, module in model.named_modules():
            if isinstance(module, models.RMSNorm):
                found = 1 + 0.2 * torch.randn(module.weight.shape, generator=generator)
                module.weight.data.copy_(torch.ones_like(found) if name == left else found)

    return edit


def new_rows(model: Any) -> None:
    table = model.embedding.weight.data
    table[FIRST_NEW:] = table[:FIRST_NEW].mean(0)


def padded(model: Any) -> None:
    model.embedding.padding_idx = PAD


def flipped_weights(model: Any) -> None:
    for mixture in every(model, "Experts"):
        own = mixture.chosen
        mixture.chosen = lambda probabilities, own=own: (own(probabilities)[0].flip(-1), own(probabilities)[1])


class Norm(torch.autograd.Function):
    """A kernel of a norm; `fault`: its gradient lacks the term of the mean square, or that of the weight is of the first row only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, fault: str) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.fault = fault
        return weight * (wide * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        straight = x.float() * inverse
        inner = grad.float() * weight.float()
        into = inner if ctx.fault == "term" else inner - straight * (inner * straight).mean(-1, keepdim=True)
        of_weight = grad.float() * straight
        of_weight = of_weight[:1] if ctx.fault == "row" else of_weight
        return (into * inverse).to(x.dtype), of_weight.sum((0, 1)).to(weight.dtype), None, None


def norm_kernel(fault: str = "", faulty: str = "") -> Any:
    def edit(model: Any) -> None:
        for name, norm in model.named_modules():
            if isinstance(norm, models.RMSNorm):
                word = fault if name == faulty else ""
                norm.forward = lambda x, norm=norm, word=word: Norm.apply(x, norm.weight, norm.eps, word)

    return edit


class Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int, fault: bool) -> Tensor:
        ctx.times, ctx.fault = times, fault
        return x.repeat_interleave(times, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts = grad.unflatten(1, (-1, ctx.times))
        return parts[:, :, 0] * ctx.times if ctx.fault else parts.sum(2), None, None


def repeat_kernel(fault: bool) -> Plant:
    def plant(_program: Program) -> None:
        models.repeated = lambda x, times: Repeat.apply(x, times, fault)

    return named(plant, "repeat kernel")


ROUTED, CAP, RESIDUAL, BASE = drawn(1.5, 3), drawn(0.3, 1.5), drawn(0.3, 0.7), drawn(3e5, 3e6)
WINDOW, LAYER, FIRST_NEW, PAD = DRAW.randint(6, 14), DRAW.randint(0, 1), DRAW.randint(60, 120), DRAW.randint(3, 6)
END, READ, WRITTEN = DRAW.randint(3, 8), DRAW.randint(3, 8), DRAW.randint(100, 200)
PROMPTS = [DRAW.randint(3, 12) for _ in range(4)]
LEFT = DRAW.choice(("layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2", "norm"))
KERNEL, KERNEL_2 = DRAW.choice(("layers.0.norm2", "layers.1.norm1", "layers.1.norm2")), DRAW.choice(("layers.0.norm1", "layers.1.norm2"))
RATE = drawn(0.12, 0.18)
QUERY = Setting(changes=(("query_norm", True),))
EXPERTS = r"mlp|__add__|gather|topk|sign|bias|chosen|probabilities"
LABELS, HEAD = r"labels|cross_entropy|where|criterion|\bloss\b|target|rows_of", r"labels|head.*backward|GPT.*backward|\bloss\b"
LOSS = r"criterion|loss|div|mean|sum|__mul__|cross_entropy|truediv"


CASES = (
    Fault(
        "expert bias in the weights",
        MOE,
        biased_experts("biased", weighted=True),
        EXPERTS,
        "huggingface/transformers#41663",
        THREE,
        golden=biased_experts("biased"),
    ),
    Fault(
        "expert bias not updated",
        replace(MOE, dtype="amp"),
        biased_experts("biased", updated=False),
        EXPERTS,
        "AI-Hypercomputer/maxtext#2494",
        BOTH,
        golden=biased_experts("biased"),
    ),
    Fault(
        "expert bias follows the first rank",
        replace(MOE, ranks=2, wrap="ddp"),
        biased_experts("biased", reduced=False),
        EXPERTS + "|all_reduce|load",
        "load not summed over ranks",
        BOTH,
        golden=biased_experts("biased"),
    ),
    Fault(
        "factor of routed experts left out",
        MOE,
        named(lambda _p: None, "plain"),
        r"mlp|__mul__",
        "routed_scaling_factor",
        BOTH,
        golden=edited("routed", scaled_experts),
    ),
    Fault(
        "logits not capped",
        AMP,
        named(lambda _p: None, "plain"),
        r"tanh|GPT|head|div|mul",
        "Gemma 2",
        THREE,
        golden=edited("capped", capped),
    ),
    Fault(
        "local and global layers exchanged",
        BF16,
        edited("local", windowed(1)),
        r"allowed|__and__|layers\.0",
        "layer types",
        BOTH,
        golden=edited("local 0", windowed(0)),
    ),
    Fault(
        "base of global layers not used",
        BF16,
        named(lambda _p: None, "plain"),
        r"layers\.1|rotary|cos|sin|attention",
        "Gemma 3",
        BOTH,
        golden=edited("base", other_base),
    ),
    Fault(
        "whole heads turned, not a part",
        AMP,
        named(lambda _p: None, "plain"),
        r"rotary|inverse|__mul__",
        "partial_rotary_factor",
        BOTH,
        golden=edited("part", partly_turned),
    ),
    Fault("norm of queries over all heads", QUERY, edited("heads", norm_of_all_heads), r"q_norm", "OLMo 2 for Qwen 3", BOTH),
    Fault(
        "a branch without its multiplier",
        BF16,
        edited("one", residuals(("attention",))),
        r"layers\.0\W|mlp|__mul__",
        "residual_multiplier",
        BOTH,
        golden=edited("both", residuals(("attention", "mlp"))),
    ),
    Fault("a square matrix transposed", BF16, edited("t", transposed(LAYER)), rf"layers\.{LAYER}\.attention\.q", "conversion", THREE),
    Fault(
        "a norm left at one",
        BF16,
        edited("left", loaded_norms(LEFT)),
        rf"(^|[^.\d]){LEFT}\W".replace(".", r"\."),
        "missing key, strict=False",
        BOTH,
        golden=edited("loaded", loaded_norms("")),
    ),
    Fault("rows of new words drawn", AMP, named(lambda _p: None, "plain"), "embedding", "resize", BOTH, golden=edited("new", new_rows)),
    Fault("a word without gradient", FP32, edited("padded", padded), "embedding", "padding_idx is a word", BOTH),
    Fault("weights of two experts exchanged", MOE, edited("flip", flipped_weights), r"mlp|flip|getitem|index", "combine", BOTH),
    Fault(
        "kernel of a norm lacks a term",
        BF16,
        edited("term", norm_kernel("term", KERNEL)),
        KERNEL.replace(".", r"\."),
        "a kernel of one's own",
        THREE,
        golden=edited("kernel", norm_kernel()),
    ),
    Fault(
        "kernel of a norm sums one row",
        AMP,
        edited("row", norm_kernel("row", KERNEL_2)),
        KERNEL_2.replace(".", r"\."),
        "a kernel of one's own",
        BOTH,
        golden=edited("kernel", norm_kernel()),
    ),
    Fault(
        "gradient of keys from one head",
        BF16,
        repeat_kernel(True),
        r"[Rr]epeat|attention\.[kv]|layers\.1\.attention",
        "a kernel of one's own",
        THREE,
        golden=repeat_kernel(False),
    ),
)
