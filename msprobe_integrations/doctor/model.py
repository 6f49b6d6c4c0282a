"""The models that the checks train: a GPT in plain torch and a model of many small parameters. Imports nothing but torch, because the
process that measures the existing tool loads this file, too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """A GPT and its batch; `length` is tokens of one sample. `layers` below 0: no GPT but a model of -`layers` small parameters."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int
    heads: int = 8


LARGE = Size(layers=24, width=2048, vocabulary=50304, batch=4, length=2048, heads=16)
"""1.4 billion parameters; a step is bound by the device."""
SMALL = Size(layers=12, width=768, vocabulary=50304, batch=1, length=128, heads=12)
"""The 125 million parameters of GPT-2, few tokens: a step is bound by the host."""
MANY = Size(layers=-5000, width=64, vocabulary=0, batch=8, length=0)
TINY = Size(layers=2, width=64, vocabulary=256, batch=2, length=16, heads=4)
"""For the CPU."""
TINY_MANY = Size(layers=-300, width=16, vocabulary=0, batch=2, length=0)
SIZES = {"large": LARGE, "small": SMALL, "many": MANY, "tiny": TINY, "tiny-many": TINY_MANY}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return attended


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size.width), Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        made: torch.Tensor = x + self.mlp(self.norm2(x))
        return made


class Gpt(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Scales(nn.Module):
    """Many small parameters: the sum of scaled inputs."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(size.width) for _ in range(-size.layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.stack(list(self.scales)).sum(0)


class Job:
    """A training job on one batch; `step` does forward, backward and AdamW once.

    Args:
        size: a name of `SIZES`, or a size.
        device, dtype: of parameters and activations.
        seed: of weights and batch; made on the CPU for small sizes, so that they are the same on every device.
    """

    def __init__(self, size: str | Size, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        size = SIZES[size] if isinstance(size, str) else size
        self.size, self.device, self.dtype = size, device, dtype
        torch.manual_seed(seed)
        with torch.device(device if size.layers * size.width > 1024 else "cpu"):
            made: nn.Module = Gpt(size) if size.layers > 0 else Scales(size)
            batch = (
                torch.randint(0, size.vocabulary, (size.batch, size.length + 1)) if size.layers > 0 else torch.randn(size.batch, size.width)
            )
        self.model = made.to(device, dtype)
        self.batch = batch.to(device) if size.layers > 0 else batch.to(device, dtype)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)

    def forward(self) -> torch.Tensor:
        """The loss of the batch."""
        if self.size.layers < 0:
            loss: torch.Tensor = self.model(self.batch).float().square().mean()
            return loss
        logits = self.model(self.batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, 1:].flatten())

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> torch.Tensor:
        """One step of training; the loss."""
        loss = self.forward()
        self.backward(loss)
        self.update()
        return loss.detach()
