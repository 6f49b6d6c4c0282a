"""Defects that people really have, each planted into one place of one training, and variations that are none.

Each function changes a training before its first step; `fault_cases.py` says what is true about them.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fault_model import Gpt, Training, world


def _method(thing: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(thing, name, types.MethodType(function, thing))


def _layer(training: Training, index: int) -> Any:
    return training.model.layers[index]


def wrong_eps(t: Training) -> None:
    _layer(t, 1).norm2.eps = 1e-2


def wrong_mask(t: Training) -> None:
    attention = _layer(t, 1).attention
    attention.future = torch.ones_like(attention.future).triu(2)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(F.gelu(leaf), leaf, grad)
        return inner * ctx.factor, None


def _own_gelu(t: Training, factor: float = 1.0) -> None:
    _method(_layer(t, 1).mlp, "act", lambda self, x: _Scaled.apply(x, factor))


def scaled_gradient(t: Training) -> None:
    _layer(t, 1).mlp.up.register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 1.3 for g in inputs))


def transposed_weight(t: Training) -> None:
    weight = _layer(t, 0).attention.proj.weight
    weight.data = weight.data.t().contiguous()


def stale_buffer(t: Training) -> None:
    def before(step: int) -> None:
        if step == 1:
            rope = _layer(t, 0).attention.rope
            rope.cos, rope.sin = rope.cos.roll(1, 0), rope.sin.roll(1, 0)

    t.before_step = before


def low_accumulation(t: Training) -> None:
    _method(_layer(t, 1).mlp.down, "product", lambda self, x, w, b: F.linear(x.bfloat16(), w.bfloat16()).float() + (0 if b is None else b))


def rope_base(t: Training) -> None:
    for layer in t.model.layers:
        layer.attention.rope.base = 500.0
        layer.attention.rope.build()


def swapped_qkv(t: Training) -> None:
    attention = _layer(t, 1).attention
    original = attention.split
    attention.split = lambda qkv: (lambda q, k, v: (k, q, v))(*original(qkv))


def swapped_qkv_weight(t: Training) -> None:
    linear = _layer(t, 1).attention.qkv
    for p in (linear.weight, linear.bias):
        q, k, v = p.data.chunk(3)
        p.data = torch.cat((k, q, v))


def loss_normalisation(t: Training) -> None:
    t.share = lambda micro: 1.0


def other_micro_batch(t: Training) -> None:
    t.pieces = lambda tokens: iter((tokens.chunk(2)[0], tokens.chunk(2)[0]))


def labels_shifted(t: Training) -> None:
    batch = t.batch
    t.batch = lambda step: (batch(step)[0], batch(step)[1].roll(1, 1))


def missing_sum(t: Training) -> None:
    """The gradients of the norms are not summed over the pieces of the sequence."""
    reduce = t.reduce

    def without(model: Gpt) -> None:
        kept = {name: p.grad.clone() for name, p in model.named_parameters() if "norm" in name}
        reduce(model)
        for name, p in model.named_parameters():
            if name in kept:
                p.grad = kept[name]

    t.reduce = without


def missing_reduction(t: Training) -> None:
    """One parameter's gradient is not averaged over the ranks."""
    reduce = t.reduce

    def without(model: Gpt) -> None:
        parameter = model.layers[1].mlp.up.weight
        kept = parameter.grad.clone()
        reduce(model)
        parameter.grad = kept

    t.reduce = without


def tp_dropout(t: Training) -> None:
    t.before_step = lambda step: torch.manual_seed(1000 + step + 17 * world()[0])  # type: ignore[assignment,return-value]


def corrupted_collective(t: Training) -> None:
    def leave(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = type(self).leave(self, x)
        if world()[0] == 1:
            with torch.no_grad():
                y[0, 0] *= 1.5
        return y

    _method(_layer(t, 1).attention.proj, "leave", leave)


def missing_row_sum(t: Training) -> None:
    _method(_layer(t, 1).mlp.down, "leave", lambda self, x: x)


def missing_enter_sum(t: Training) -> None:
    _method(_layer(t, 1).mlp.up, "enter", lambda self, x: x)


class _Fused(torch.autograd.Function):
    """Softmax with one NaN, as a fused kernel that reads one element too far."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        y.view(-1)[5] = float("nan")
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


def nan_in_fused(t: Training) -> None:
    _method(_layer(t, 1).attention, "softmax", lambda self, x: _Fused.apply(x))


def fp16_overflow(t: Training) -> None:
    _method(_layer(t, 1).attention, "scores", lambda self, q, k: torch.matmul(q * 600, k.transpose(-1, -2) * 600) / math.sqrt(self.width))


def fp16_backward_overflow(t: Training) -> None:
    _layer(t, 2).mlp.down.register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 6e4 * 1e3 for g in inputs))


def no_scale(t: Training) -> None:
    _method(_layer(t, 1).attention, "scores", lambda self, q, k: torch.matmul(q, k.transpose(-1, -2)))


def tanh_gelu(t: Training) -> None:
    _method(_layer(t, 1).mlp, "act", lambda self, x: F.gelu(x, approximate="tanh"))


def no_residual(t: Training) -> None:
    _method(_layer(t, 1), "join", lambda self, x, y: y)


def heads_mixed(t: Training) -> None:
    _method(_layer(t, 1).attention, "merge", lambda self, x: x.reshape(x.shape[0], -1, self.heads * self.width))


def detached(t: Training) -> None:
    _method(_layer(t, 1).mlp, "act", lambda self, x: F.gelu(x).detach())


def low_softmax(t: Training) -> None:
    _method(_layer(t, 1).attention, "softmax", lambda self, x: torch.softmax(x.bfloat16(), -1).float())


def wrong_initial_weight(t: Training) -> None:
    weight = _layer(t, 2).mlp.up.weight
    weight.data = weight.data * 1.02


def in_place_residual(t: Training) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        x.data.mul_(0.9)  # unseen by autograd's version counter, as a kernel's write is
        return y

    _method(_layer(t, 1).norm2, "forward", forward)


def wrong_position(t: Training) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
        return x * self.cos.to(x.dtype).roll(1, 0) + turned * self.sin.to(x.dtype).roll(1, 0)

    _method(_layer(t, 1).attention.rope, "forward", forward)


def wrong_dropout(t: Training) -> None:
    _layer(t, 1).drop.p = 0.3


def learning_rate(t: Training) -> None:
    for group in t.optimizer.param_groups:
        group["lr"] = 2e-3


def skipped_parameter(t: Training) -> None:
    last = t.model.layers[1].mlp.up.weight
    update = t.update

    def without() -> None:
        before = last.detach().clone()
        update()
        last.data.copy_(before)

    t.update = without


def wrong_loss_dtype(t: Training) -> None:
    t.loss = lambda logits, labels: F.cross_entropy(logits.bfloat16().flatten(0, 1), labels.flatten()).float()


def padded_loss(t: Training) -> None:
    t.loss = lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=int(labels[0, 0]))


def wrong_token(t: Training) -> None:
    batch = t.batch

    def changed(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels = batch(step)
        tokens = tokens.clone()
        if world()[0] == world()[1] - 1:
            tokens[0, 3] = (tokens[0, 3] + 1) % t.shape.vocab
        return tokens, labels

    t.batch = changed


# harmless

_OVERRIDES: list[Any] = []


def _products(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Compute all products of matrices with `product` from now on: below Python, where a device does it and no record changes."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", product, "CPU", allow_override=True)
    library.impl("addmm", lambda c, a, b, beta=1, alpha=1: beta * c + alpha * product(a, b), "CPU", allow_override=True)
    _OVERRIDES.append(library)


def other_order(t: Training) -> None:
    """Products are summed from the last element to the first."""
    bmm = torch.bmm
    _products(lambda a, b: bmm(a.flip(1)[None], b.flip(0)[None])[0])


def two_halves(t: Training) -> None:
    """Products are summed in two halves, each rounded to its dtype before they are added, as kernels that split the sum do."""
    bmm = torch.bmm

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        half = a.shape[1] // 2
        return (bmm(a[None, :, :half], b[None, :half]) + bmm(a[None, :, half:], b[None, half:]))[0]

    _products(product)


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to ten bits of mantissa, as tensor cores read float32."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def tf32_noise(t: Training) -> None:
    """All products of float32 matrices read rounded numbers."""
    bmm = torch.bmm
    _products(lambda a, b: bmm(_tf32(a)[None], _tf32(b)[None])[0])


def compiled(t: Training, backend: str = "inductor") -> None:
    """The model is compiled: records end at its boundary."""
    t.model = torch.compile(t.model, backend=backend)  # type: ignore[assignment]


def compiled_blocks(t: Training, backend: str = "inductor") -> None:
    """Each block is compiled: records end at the boundaries of the blocks."""
    for layer in t.model.layers:
        layer.compile(backend=backend)


def ulp_noise(t: Training) -> None:
    """Every weight moves by at most one rounding unit."""
    generator = torch.Generator().manual_seed(3)
    for parameter in t.model.parameters():
        sign = torch.randint(-1, 2, parameter.shape, generator=generator).to(parameter.dtype)
        parameter.data += parameter.data * sign * torch.finfo(parameter.dtype).eps
