"""The workloads of the benchmarks, a plain-PyTorch GPT: large enough per call (compute-bound), not (host-bound), or with much to
monitor and few tokens (monitored: 29 M parameters, head tied)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Workload:
    """Size of a GPT and its batch; lengths are tokens."""

    name: str
    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int
    heads: int = 8
    tied: bool = False


COMPUTE_BOUND = Workload("compute-bound", layers=7, width=512, vocabulary=8192, batch=4, length=128)
HOST_BOUND = Workload("host-bound", layers=24, width=128, vocabulary=512, batch=2, length=32)
MONITORED = Workload("monitored", layers=6, width=512, vocabulary=20_000, batch=1, length=64, tied=True)
WORKLOADS = {w.name: w for w in (COMPUTE_BOUND, HOST_BOUND, MONITORED)}


class Attention(nn.Module):
    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.heads = w.heads
        self.qkv = nn.Linear(w.width, 3 * w.width)
        self.out = nn.Linear(w.width, w.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class Mlp(nn.Module):
    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.fc1 = nn.Linear(w.width, 4 * w.width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * w.width, w.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(w.width)
        self.attn = Attention(w)
        self.ln2 = nn.LayerNorm(w.width)
        self.mlp = Mlp(w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(w.vocabulary, w.width)
        self.positions = nn.Embedding(w.length, w.width)
        self.blocks = nn.ModuleList([Block(w) for _ in range(w.layers)])
        self.norm = nn.LayerNorm(w.width)
        self.head = nn.Linear(w.width, w.vocabulary, bias=False)
        if w.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Job:
    """One training job; `step()` does forward, backward and AdamW once."""

    def __init__(self, w: Workload, device: str = "cpu", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Gpt(w).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.ids = torch.randint(0, w.vocabulary, (w.batch, w.length + 1), device=device)

    def forward(self) -> torch.Tensor:
        """The loss of the one batch."""
        logits = self.model(self.ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten())

    def update(self) -> None:
        """Optimizer step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> torch.Tensor:
        """One training step; returns the loss."""
        loss = self.forward()
        loss.backward()
        self.update()
        return loss.detach()
