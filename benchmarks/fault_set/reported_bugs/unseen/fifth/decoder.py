"""The model of the fifth set: a decoder with what models of these years have: windows in turn with whole attention, sinks, normed queries
and keys, a part of each head turned, a head for the token after the next."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, DEPTH, HEADS, SHARED = 160, 64, 2, 4, 2
SIZE = WIDTH // HEADS


@dataclass
class Parts:
    """Of the decoder."""

    window: int = 7
    sinks: bool = True
    normed: bool = True
    turned: float = 0.5
    next: bool = True
    multiplier: float = 0.5
    slopes: bool = False
    expanded: bool = True
    one_call: bool = False


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, 1e-5).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Heads are counted from what projections give, for a rank may have some of them."""

    def __init__(self, parts: Parts, number: int) -> None:
        super().__init__()
        self.parts, self.window = parts, parts.window if number % 2 == 0 else 0
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, SHARED * SIZE, bias=False) for _ in range(2))
        if parts.normed:
            self.q_norm, self.k_norm = Norm(SIZE), Norm(SIZE)
        if parts.sinks:
            self.sinks = nn.Parameter(torch.zeros(HEADS))

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        size = int(SIZE * self.parts.turned)
        angles = positions[:, :, None, None].float() * 10000.0 ** (-torch.arange(0, size, 2) / size)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def queries_and_keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (linear(x).unflatten(-1, (-1, SIZE)) for linear in (self.q, self.k))
        if self.parts.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.turn(q, positions), self.turn(k, positions)

    def seen(self, documents: Tensor) -> Tensor:
        place = torch.arange(documents.shape[1])
        distance = place[:, None] - place[None]
        near = (distance >= 0) & (distance < (self.window or documents.shape[1]))
        return (near & (documents[:, :, None] == documents[:, None]))[:, None]

    def slope(self) -> Tensor:
        return 2.0 ** (-8.0 * torch.arange(1, HEADS + 1) / HEADS)

    def bias(self, length: int) -> Tensor:
        place = torch.arange(length)
        return -self.slope()[:, None, None] * (place[:, None] - place[None]).abs()

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).float() * SIZE**-0.5
        if self.parts.slopes:
            scores = scores + self.bias(scores.shape[-1])
        return scores.masked_fill(~seen, -1e30)

    def chances(self, scores: Tensor) -> Tensor:
        if not self.parts.sinks:
            return scores.softmax(-1)
        sinks = self.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]

    def core(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Of heads before places."""
        if self.parts.one_call:
            return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=not self.parts.expanded)
        return self.chances(self.scores(q, k, seen)).to(v.dtype) @ v

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        q, k = self.queries_and_keys(x, positions)
        q, k, v = (y.transpose(1, 2) for y in (q, k, self.v(x).unflatten(-1, (-1, SIZE))))
        if self.parts.expanded:
            k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        return self.o(self.core(q, k, v, self.seen(documents)).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, parts: Parts, number: int) -> None:
        super().__init__()
        self.before, self.attention, self.between, self.mlp = Norm(WIDTH), Attention(parts, number), Norm(WIDTH), Mlp()

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), positions, documents)
        return x + self.mlp(self.between(x))


class Ahead(nn.Module):
    """Predicts the token after the next from the state of a place and the next token."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.state, self.token, self.joined = Norm(WIDTH), Norm(WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.layer = Layer(parts, 1)

    def forward(self, x: Tensor, following: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        return self.layer(self.joined(torch.cat([self.state(x), self.token(following)], -1)), positions, documents)


class Decoder(nn.Module):
    """A stage of a pipeline lacks what others have."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.embedding: Any = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(n): Layer(parts, n) for n in range(DEPTH)})
        self.norm: Any = Norm(WIDTH)
        self.head: Any = nn.Linear(WIDTH, WORDS, bias=False)
        self.ahead = Ahead(parts) if parts.next else None
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.5 if "embedding" in name else 0.6 / math.sqrt(parameter.shape[1]))
            elif name.endswith("sinks"):
                nn.init.normal_(parameter)
            else:
                parameter.data.add_(torch.randn(parameter.shape) * 0.05)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor) -> Any:
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers.values():
            x = layer(x, positions, documents)
        if self.head is None:
            return x
        out = self.logits(x)
        return out if self.ahead is None else (out, x)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)) * self.parts.multiplier


class Whole(nn.Module):
    """The decoder with its second prediction, in one forward pass."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.decoder = Decoder(parts)

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> tuple[Tensor, Tensor | None]:
        found = self.decoder(tokens, positions, documents)
        if self.decoder.ahead is None:
            return found, None
        out, x = found
        following = self.decoder.embedding(tokens.roll(-1, 1))
        return out, self.decoder.logits(self.decoder.ahead(x, following, positions, documents))
