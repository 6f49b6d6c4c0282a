"""A small transformer trained under the debugger."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msprobe_engine.core import log

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 12, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x).to(torch.bfloat16).float()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(config: dict[str, Any], steps: int = 2) -> list[Path]:
    """Some steps under the debugger as rank 0; returns the directories of the dumped ones, in order."""
    from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    PrecisionDebugger._instance = None
    made = PrecisionDebugger(config)  # type: ignore[arg-type]
    for step in range(steps):
        ids = torch.randint(0, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
        PrecisionDebugger.start(model, rank_id=0)
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        PrecisionDebugger.stop()
        optimizer.step()
        optimizer.zero_grad()
        PrecisionDebugger.step()
    made.run.at_exit()
    atexit.unregister(made._at_exit)
    PrecisionDebugger._instance = None
    log.set_rank(None)
    return sorted(Path(config["dump_path"]).glob("step*/rank0"))
