"""Pairs of trainings that differ in nothing but rounding, or in nothing; and single runs that are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from reported_bugs import models
from reported_bugs.case import Healthy, every, in_model, nothing, when_ready
from reported_bugs.faults.in_models import AMP, EAGER, GPT, MOE, PACKED
from reported_bugs.faults.in_ranks import DDP, DDP_AMP, DDP_MICRO, FSDP
from reported_bugs.faults.in_transformers import GPT2, LLAMA, MIXTRAL, OWN, QWEN2, QWEN3, QWEN_MOE
from reported_bugs.training import Program, Setting
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

ALL, TWO, WATCHED = ("mix", "L1", "L0", "monitor"), ("mix", "L0"), ("mix", "L1", "L0")
FP32 = Setting(dtype="fp32")


def math_kernel(p: Program) -> None:
    own = p.step

    def step(number: int) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return own(number)

    p.step = step  # type: ignore[method-assign]


def norm_of_torch(model: Any) -> None:
    for norm in every(model, models.RMSNorm):
        norm.forward = lambda x, norm=norm: norm.weight * F.rms_norm(x.float(), x.shape[-1:], None, norm.eps).to(x.dtype)


def norm_by_division(model: Any) -> None:
    for norm in every(model, models.RMSNorm):
        norm.forward = lambda x, norm=norm: (
            norm.weight * (x.float() / torch.sqrt(x.float().square().mean(-1, keepdim=True) + norm.eps)).to(x.dtype)
        )


def log_softmax(p: Program) -> None:
    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        found = F.log_softmax(logits.float().view(-1, logits.shape[-1]), -1)
        return F.nll_loss(found, labels.reshape(-1), ignore_index=-100, reduction="sum")

    p.criterion = criterion  # type: ignore[method-assign]


def gathered(p: Program) -> None:
    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        wide, kept = logits.float().view(-1, logits.shape[-1]), labels.reshape(-1) != -100
        found = torch.logsumexp(wide, -1) - wide.gather(1, labels.reshape(-1, 1).clamp_min(0))[:, 0]
        return found[kept].sum()

    p.criterion = criterion  # type: ignore[method-assign]


def set_to_zero(p: Program) -> None:
    own = p.optimizer.zero_grad
    p.optimizer.zero_grad = lambda set_to_none=True: own(set_to_none=False)


def optimizer_with(**more: Any) -> Any:
    return lambda p: setattr(p, "setting", replace(p.setting, optimizer=tuple(more.items())))


def backwards(p: Program) -> None:
    own = p.groups
    p.groups = lambda: [{**group, "params": group["params"][::-1]} for group in own()]  # type: ignore[method-assign]


def one_by_one(p: Program) -> None:
    """A group per parameter."""
    own = p.groups
    p.groups = lambda: [{**group, "params": [q]} for group in own() for q in group["params"]]  # type: ignore[method-assign]


def split_products(model: Any) -> None:
    for linear in every(model, nn.Linear):

        def forward(x: Tensor, linear: Any = linear) -> Tensor:
            half = x.shape[-1] // 2
            found = F.linear(x[..., :half], linear.weight[:, :half]).float() + F.linear(x[..., half:], linear.weight[:, half:]).float()
            return (found if linear.bias is None else found + linear.bias.float()).to(x.dtype)

        linear.forward = forward


def fused_projection(model: Any) -> None:
    """Gate and up in one product."""
    for mlp in every(model, models.MLP):

        def forward(x: Tensor, mlp: Any = mlp) -> Tensor:
            gate, up = F.linear(x, torch.cat([mlp.gate.weight, mlp.up.weight])).chunk(2, -1)
            return mlp.down(F.silu(gate) * up)

        mlp.forward = forward


def not_contiguous(model: Any) -> None:
    for layer in model.layers:
        weight = layer.mlp.down.weight
        weight.data = weight.data.t().contiguous().t()


def threads(number: int) -> Any:
    return when_ready(lambda _p: torch.set_num_threads(number))


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **more: Any) -> Any:
        return self.inner(*args, **more)


def wrapped(p: Program) -> None:
    p.net = Wrapped(p.net)


def other_seed(_p: Program) -> None:
    import random

    random.seed(77)


def logged(p: Program) -> None:
    own = p.clip

    def clip() -> None:
        print(sum(float(q.grad.float().norm() ** 2) for q in p.model.parameters()) ** 0.5)
        own()

    p.clip = clip  # type: ignore[method-assign]


def not_balanced(model: Any) -> None:
    """No loss that balances experts: it is another one for another cut of the batch."""
    for moe in every(model, models.Experts):
        moe.balance = lambda probabilities, experts: torch.zeros(())


def small_buckets(p: Program) -> None:
    p.ddp_arguments = lambda: {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": True}  # type: ignore[method-assign]


def always_synchronised(p: Program) -> None:
    import contextlib

    p.synchronised = lambda _micro: contextlib.nullcontext()  # type: ignore[method-assign]


def compiled_mlp(model: Any) -> None:
    for layer in model.layers:
        layer.mlp = torch.compile(layer.mlp, backend="aot_eager")


def compiled_norm(_p: Program) -> None:
    models.RMSNorm.forward = torch.compile(models.RMSNorm.forward, backend="inductor")  # type: ignore[method-assign]


def hf_recomputed(reentrant: bool) -> Any:
    def finish(p: Program) -> None:
        p.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            p.model.enable_input_require_grads()

    return when_ready(finish)


class TenBits(TorchDispatchMode):
    """Products of float32 as many devices compute them: what goes in is rounded to ten bits of mantissa, and summed up in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            args = (*args[:-2], *(ten_bits_of(one) for one in args[-2:]))
        return func(*args, **(kwargs or {}))


def ten_bits_of(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) if x.dtype == torch.float32 else x


def ten_bits(p: Program) -> None:
    own = p.step

    def step(number: int) -> Tensor:
        with TenBits():
            return own(number)

    p.step = step  # type: ignore[method-assign]


def copies(p: Program) -> None:
    """The optimizer moves copies in float32 of weights in bfloat16."""
    wide = {q: q.detach().float().requires_grad_() for q in p.model.parameters()}
    groups = [{**group, "params": [wide[q] for q in group["params"]]} for group in p.groups()]
    p.groups = lambda: groups  # type: ignore[method-assign]
    p.optimizer = p.make_optimizer()
    p.scheduler = torch.optim.lr_scheduler.LambdaLR(p.optimizer, p.rate)

    def clip() -> None:
        for q, copy in wide.items():
            copy.grad, q.grad = q.grad.float(), None
        torch.nn.utils.clip_grad_norm_(wide.values(), p.setting.clip)

    def update() -> None:
        p.optimizer.step()
        with torch.no_grad():
            for q, copy in wide.items():
                q.copy_(copy)

    p.clip, p.update = clip, update  # type: ignore[method-assign]


def with_(setting: Setting, **changes: Any) -> Setting:
    return replace(setting, changes=(*setting.changes, *changes.items()))


def same(name: str, setting: Setting, plant: Any, levels: tuple[str, ...] = TWO) -> Healthy:
    return Healthy(name, setting, setting, plant, levels)


DROPPED = with_(GPT, dropout=0.1)

CASES = (
    same("a repeat", GPT, nothing, (*ALL, "md5")),
    same("a repeat with dropout", DROPPED, nothing),
    Healthy("two micro batches for one", GPT, replace(GPT, micro=2), levels=ALL),
    Healthy("four micro batches for two", replace(GPT, micro=2), replace(GPT, micro=4), levels=TWO),
    Healthy("two micro batches for one, fp32", FP32, replace(FP32, micro=2), levels=ALL),
    Healthy("two micro batches for one, amp", AMP, replace(AMP, micro=2), levels=ALL),
    Healthy("fused attention for eager", EAGER, GPT, levels=ALL),
    same("math kernel of attention", GPT, when_ready(math_kernel), TWO),
    same("foreach for loop", GPT, optimizer_with(foreach=True), ALL),
    same("fused optimizer", GPT, optimizer_with(fused=True), ALL),
    same("fused optimizer, fp32", FP32, optimizer_with(fused=True), ("mix", "monitor")),
    same("norm of torch", GPT, in_model(norm_of_torch), WATCHED),
    same("norm by division", GPT, in_model(norm_by_division), WATCHED),
    same("norm by division, fp32", FP32, in_model(norm_by_division), WATCHED),
    same("log_softmax and nll", GPT, when_ready(log_softmax), ALL),
    same("logsumexp and gather", GPT, when_ready(gathered), ALL),
    same("gradients set to zero", GPT, when_ready(set_to_zero), ALL),
    same("parameters in another order", GPT, backwards, ALL),
    same("a group per parameter", GPT, one_by_one, ALL),
    same("products in two halves", GPT, in_model(split_products), WATCHED),
    same("products in two halves, fp32", FP32, in_model(split_products), ALL),
    same("gate and up in one product", GPT, in_model(fused_projection), WATCHED),
    same("a weight not contiguous", GPT, in_model(not_contiguous), ALL),
    same("two threads", GPT, threads(2), ("mix", "L0", "monitor")),
    same("a wrapper", GPT, when_ready(wrapped), ALL),
    same("a seed that does not matter", GPT, when_ready(other_seed), TWO),
    same("logging", GPT, when_ready(logged), ALL),
    Healthy("recomputation", GPT, with_(GPT, checkpoint="new"), levels=ALL),
    Healthy("recomputation with dropout", DROPPED, with_(DROPPED, checkpoint="new"), levels=WATCHED),
    Healthy("reentrant recomputation", with_(GPT, checkpoint="new"), with_(GPT, checkpoint="reentrant"), levels=ALL),
    same("compiled parts", GPT, in_model(compiled_mlp), TWO),
    same("compiled norms", FP32, compiled_norm, TWO),
    same("packed, a repeat in two micro batches", PACKED, nothing, ("mix",)),
    Healthy("packed, two micro batches", PACKED, replace(PACKED, micro=2), levels=WATCHED),
    Healthy("ddp for one process", GPT, DDP, levels=ALL),
    Healthy("ddp for one process, amp", AMP, DDP_AMP, levels=ALL),
    Healthy("ddp for one process, fp32", FP32, replace(DDP, dtype="fp32"), levels=ALL),
    Healthy("fsdp for ddp", DDP, FSDP, levels=ALL),
    Healthy("fsdp for one process", GPT, FSDP, levels=ALL),
    same("small buckets", DDP, small_buckets, ALL),
    same("synchronised every micro batch", DDP_MICRO, when_ready(always_synchronised), ALL),
    Healthy("experts: two micro batches", MOE, replace(MOE, micro=2), in_model(not_balanced), WATCHED, in_model(not_balanced)),
    Healthy("experts: ddp for one process", MOE, replace(MOE, ranks=2, wrap="ddp"), in_model(not_balanced), TWO, in_model(not_balanced)),
    Healthy(
        "experts: ddp for one process, fp32",
        replace(MOE, dtype="fp32"),
        replace(MOE, dtype="fp32", ranks=2, wrap="ddp"),
        in_model(not_balanced),
        TWO,
        in_model(not_balanced),
    ),
    Healthy("copies of the weights in float32: two micro batches", GPT, replace(GPT, micro=2), when_ready(copies), ALL, when_ready(copies)),
    same("products with ten bits", FP32, when_ready(ten_bits), ("mix", "L0", "monitor")),
    same("products with ten bits, eager attention", replace(FP32, changes=(("fused", False),)), when_ready(ten_bits), TWO),
    Healthy("llama: eager attention for sdpa", LLAMA, replace(LLAMA, attention="eager"), levels=ALL),
    Healthy("llama: two micro batches", OWN, replace(OWN, micro=2), levels=ALL),
    same("llama: recomputation", LLAMA, hf_recomputed(False), WATCHED),
    Healthy("llama: reentrant recomputation", LLAMA, LLAMA, hf_recomputed(True), WATCHED, hf_recomputed(False)),
    Healthy("llama: ddp for one process", LLAMA, replace(LLAMA, ranks=2, wrap="ddp"), levels=ALL),
    Healthy("llama: fsdp for one process", LLAMA, replace(LLAMA, ranks=2, wrap="fsdp"), levels=ALL),
    Healthy("gpt2: eager attention for sdpa", GPT2, replace(GPT2, attention="eager"), levels=WATCHED),
    Healthy("qwen3: eager attention for sdpa", QWEN3, replace(QWEN3, attention="eager"), levels=TWO),
    Healthy("qwen2: two micro batches", QWEN2, replace(QWEN2, micro=2), levels=WATCHED),
    Healthy("mixtral: eager attention for sdpa", MIXTRAL, replace(MIXTRAL, attention="eager"), levels=WATCHED),
    same("mixtral: fused optimizer", MIXTRAL, optimizer_with(fused=True), ALL),
    *(
        Healthy(
            f"alone: {s.family} {s.dtype} {s.wrap}{' experts' if s is MOE else ''}",
            replace(s, lr=5e-3),
            None,
            levels=("mix", "L0", "monitor"),
        )
        for s in (GPT, AMP, MOE, DDP, FSDP, LLAMA, MIXTRAL, QWEN_MOE)
    ),
)
