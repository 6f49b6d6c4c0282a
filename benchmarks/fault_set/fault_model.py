"""A small GPT in plain torch that can be built with tensor, sequence and data parallelism, and whose parts can be replaced one by one.

Weights and data come from fixed seeds and are cut for the rank, so every layout trains the same model on the same tokens. Each step of
attention is a method of its own: a defect replaces one of them in one layer (`fault_defects.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """What is trained and how it is laid out.

    Attributes:
        parallel: ``single``, ``tp``, ``sp`` (tensor parallel with the sequence cut between the blocks) or ``dp``.
        micro: micro batches a step is cut into.
        dtype: of the weights and activations.
        autocast: compute matrix products in this dtype.
        scale: factor on the loss before backward, as GradScaler has it.
    """

    parallel: str = "single"
    layers: int = 3
    hidden: int = 32
    heads: int = 4
    vocab: int = 64
    length: int = 16
    batch: int = 4
    micro: int = 1
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    steps: int = 2
    extra: tuple[tuple[str, Any], ...] = field(default=())

    @property
    def tensor_parallel(self) -> bool:
        return self.parallel in ("tp", "sp")


def world() -> tuple[int, int]:
    """(rank, ranks)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class _Enter(torch.autograd.Function):
    """The same on all ranks going in; gradients are summed coming back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    """Sums the parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _together(piece: torch.Tensor) -> torch.Tensor:
    """The pieces of the sequence of all ranks, one behind the other."""
    parts = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, piece.contiguous())
    return torch.cat(parts, 1)


class _Gather(torch.autograd.Function):
    """Puts the pieces of the sequence together; gradients are summed and cut."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _together(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class _Join(torch.autograd.Function):
    """Puts the pieces of the sequence together for what all ranks compute alike; each takes its piece of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _together(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class _Scatter(torch.autograd.Function):
    """Sums the parts of all ranks and keeps this rank's piece of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _together(grad)


class Linear(nn.Module):
    """``cut``: None, ``rows`` (output features over ranks) or ``columns`` (input features over ranks, summed afterwards)."""

    def __init__(self, inputs: int, outputs: int, shape: Shape, cut: str | None = None, blocks: int = 1) -> None:
        super().__init__()
        self.parallel, self.cut = shape.parallel, cut if shape.tensor_parallel else None
        whole = torch.randn(outputs, inputs) * 0.2 / math.sqrt(inputs / 32)
        offset = torch.randn(outputs) * 0.02
        rank, ranks = world()
        if self.cut == "rows":  # `blocks` groups of rows (query, key, value) are cut each
            whole = whole.view(blocks, -1, inputs).chunk(ranks, 1)[rank].reshape(-1, inputs)
            offset = offset.view(blocks, -1).chunk(ranks, 1)[rank].reshape(-1)
        elif self.cut == "columns":
            whole = whole.chunk(ranks, 1)[rank]
        self.weight = nn.Parameter(whole.contiguous().to(shape.dtype))
        self.bias = nn.Parameter(offset.contiguous().to(shape.dtype))
        if self.cut is not None:
            self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron marks its parameters
            self.weight.partition_dim = 0 if self.cut == "rows" else 1  # type: ignore[attr-defined]
            self.weight.partition_stride = 1  # type: ignore[attr-defined]
        if self.cut == "rows":  # each rank has its part of the bias: the norm for clipping adds them up
            self.bias.tensor_model_parallel, self.bias.partition_dim = True, 0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cut == "rows":
            x = self.enter(x)
            return self.product(x, self.weight, self.bias)
        if self.cut == "columns":
            return self.leave(self.product(x, self.weight, None)) + self.bias
        return self.product(x, self.weight, self.bias)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return _Gather.apply(x) if self.parallel == "sp" else _Enter.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return _Scatter.apply(x) if self.parallel == "sp" else _Leave.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter((1 + 0.1 * torch.randn(shape.hidden)).to(shape.dtype))
        self.bias = nn.Parameter((0.1 * torch.randn(shape.hidden)).to(shape.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Rope(nn.Module):
    """Rotary position embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width, self.length, self.base = shape.hidden // shape.heads, shape.length, 10000.0
        self.build()

    def build(self) -> None:
        angle = torch.arange(self.length)[:, None] / self.base ** (torch.arange(0, self.width, 2) / self.width)
        self.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angle.sin().repeat(1, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
        return x * self.cos.to(x.dtype) + turned * self.sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads // (world()[1] if shape.tensor_parallel else 1)
        self.width = shape.hidden // shape.heads
        self.qkv = Linear(shape.hidden, 3 * shape.hidden, shape, "rows", 3)
        self.rope = Rope(shape)
        self.proj = Linear(shape.hidden, shape.hidden, shape, "columns")
        self.drop = nn.Dropout(shape.dropout)
        self.register_buffer("future", torch.ones(shape.length, shape.length, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.qkv(x))
        weights = self.drop(self.softmax(self.mask(self.scores(self.rope(q), self.rope(k)))))
        return self.proj(self.merge(self.mix(weights, v)))

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = qkv.view(*qkv.shape[:2], 3, self.heads, self.width).unbind(2)
        return tuple(part.transpose(1, 2) for part in parts)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.width)

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(self.future, -1e4)

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores, -1)

    def mix(self, weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.matmul(weights, v)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], -1, self.heads * self.width)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = Linear(shape.hidden, 4 * shape.hidden, shape, "rows")
        self.down = Linear(4 * shape.hidden, shape.hidden, shape, "columns")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(shape), Attention(shape)
        self.norm2, self.mlp = Norm(shape), Mlp(shape)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.join(x, self.drop(self.attention(self.norm1(x))))
        return self.join(x, self.drop(self.mlp(self.norm2(x))))

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Gpt(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden, dtype=shape.dtype)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False, dtype=shape.dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.shape.parallel == "sp":
            x = x.chunk(world()[1], 1)[world()[0]]
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if self.shape.parallel == "sp":
            x = _Join.apply(x)  # type: ignore[no-untyped-call]
        return self.head(x)  # type: ignore[no-any-return]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)  # type: ignore[no-any-return]


@dataclass
class Training:
    """One training; a defect changes what it likes before the first step.

    Attributes:
        loss: (logits, labels) -> scalar.
        batch: step -> (tokens, labels), each (batch, length); this rank's part of the batch under ``dp``.
        share: factor of a micro batch's loss.
        reduce: called after the backward passes of a step, with the model.
        update: makes the update.
    """

    shape: Shape
    model: Gpt = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = field(init=False)
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = field(init=False)
    share: Callable[[int], float] = field(init=False)
    pieces: Callable[[torch.Tensor], Iterator[torch.Tensor]] = field(init=False)
    reduce: Callable[[Gpt], None] = field(init=False)
    update: Callable[[], None] = field(init=False)
    before_step: Callable[[int], None] = field(init=False)

    def __post_init__(self) -> None:
        self.model = Gpt(self.shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01)
        self.loss = lambda logits, labels: F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        self.batch = self._batch
        self.share = lambda micro: 1 / micro
        self.pieces = lambda tokens: iter(tokens.chunk(self.shape.micro))
        self.reduce = self._reduce
        self.update = self._update
        self.before_step = lambda step: None

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 + step)
        tokens = torch.randint(self.shape.vocab, (self.shape.batch, self.shape.length + 1), generator=generator)
        if self.shape.parallel == "dp":
            tokens = tokens.chunk(world()[1])[world()[0]]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _reduce(self, model: Gpt) -> None:
        for name, parameter in model.named_parameters():
            if self.shape.parallel == "dp":
                dist.all_reduce(parameter.grad)
                parameter.grad /= world()[1]  # type: ignore[operator]
            elif self.shape.parallel == "sp" and whole_under_sp(name):
                dist.all_reduce(parameter.grad)

    def _update(self) -> None:
        if self.shape.scale != 1.0:
            for parameter in self.model.parameters():
                parameter.grad /= self.shape.scale  # type: ignore[operator]
        self.clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self, limit: float) -> None:
        """Scale all gradients down to the norm `limit` over all ranks."""
        cut, whole = torch.zeros(()), torch.zeros(())
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        for parameter in parameters:
            square = parameter.grad.float().square().sum()  # type: ignore[union-attr]
            if getattr(parameter, "tensor_model_parallel", False):
                cut += square
            else:
                whole += square
        if self.shape.tensor_parallel:
            dist.all_reduce(cut)
        factor = torch.clamp(limit / ((cut + whole).sqrt() + 1e-6), max=1.0)
        for parameter in parameters:
            parameter.grad *= factor.to(parameter.dtype)  # type: ignore[operator]

    def step(self, number: int) -> float:
        """One step; the mean loss."""
        torch.manual_seed(1000 + number)
        self.before_step(number)
        tokens, labels = self.batch(number)
        total = 0.0
        for inputs, targets in zip(self.pieces(tokens), self.pieces(labels)):
            loss = self.loss(self.model(inputs), targets) * self.share(self.shape.micro)
            (loss * self.shape.scale).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.reduce(self.model)
        self.update()
        return total


def whole_under_sp(name: str) -> bool:
    """Parameters that every rank holds whole while it sees a piece of the sequence: their gradients are sums over ranks."""
    return "norm" in name or name.endswith(("proj.bias", "down.bias")) or name == "embedding.weight"
