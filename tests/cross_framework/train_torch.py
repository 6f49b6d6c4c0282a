"""The small transformer in PyTorch, dumped by our own PrecisionDebugger: ``train_torch.py OUT LEVEL TASK STYLE STEPS``.

Styles: ``plain`` (a linear layer each for queries, keys and values), ``fused`` (one for all three).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from msprobe.pytorch import PrecisionDebugger

sys.path.insert(0, str(Path(__file__).parent))
import weights as w


class Attention(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        if style == "fused":
            self.qkv = nn.Linear(w.HIDDEN, 3 * w.HIDDEN)
        else:
            self.q, self.k, self.v = (nn.Linear(w.HIDDEN, w.HIDDEN) for _ in range(3))
        self.o = nn.Linear(w.HIDDEN, w.HIDDEN)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], w.HEADS, -1).transpose(1, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, dim=-1) if self.style == "fused" else (self.q(x), self.k(x), self.v(x))
        q, k, v = map(self.heads, parts)
        scores = torch.matmul(q, k.transpose(-2, -1)) / (w.HIDDEN // w.HEADS) ** 0.5
        attention = torch.softmax(scores + mask, dim=-1)
        context = torch.matmul(attention, v).transpose(1, 2).contiguous().view(x.shape)
        return self.o(context)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(w.HIDDEN, 4 * w.HIDDEN), nn.GELU(), nn.Linear(4 * w.HIDDEN, w.HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(w.HIDDEN, eps=w.EPSILON), Attention(style)
        self.ln2, self.mlp = nn.LayerNorm(w.HIDDEN, eps=w.EPSILON), Mlp()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x), mask)
        return x + self.mlp(self.ln2(x))


class Net(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.emb = nn.Embedding(w.VOCAB, w.HIDDEN)
        self.blocks = nn.ModuleList([Block(style) for _ in range(w.LAYERS)])
        self.norm, self.head = nn.LayerNorm(w.HIDDEN, eps=w.EPSILON), nn.Linear(w.HIDDEN, w.VOCAB)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def main(out: str, level: str, task: str, style: str, steps: int) -> None:
    torch.manual_seed(0)
    net = Net(style)
    values = w.fused(w.make()) if style == "fused" else w.make()
    net.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    optimizer = torch.optim.Adam(net.parameters(), lr=w.RATE)
    mask = torch.triu(torch.full((w.TOKENS, w.TOKENS), -1e9), 1)
    debugger = PrecisionDebugger(dump_path=str(w.out_of(out)), task=task, level=level)
    for step in range(steps):
        ids, labels = (torch.from_numpy(array).long() for array in w.tokens(step))
        debugger.start(model=net)
        loss = F.cross_entropy(net(ids, mask).reshape(-1, w.VOCAB), labels.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        debugger.stop()
        optimizer.step()
        debugger.step()


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
