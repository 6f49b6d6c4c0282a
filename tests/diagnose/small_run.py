"""A training of one process that leaves a dump of one step: ``small_run.py OUTPUT_DIR``. Modules in modules, views and casts, a call that
takes only the form of what it is given, memory that nobody has written, an optimizer with states."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

OUT = Path(sys.argv[1])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.norm(x).view(3, 2, 2)
        return x + self.down(torch.softmax(heads.to(torch.float64), -1).to(torch.float32).reshape(3, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(6, 4), Block()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        kept = torch.empty(x.shape)
        kept.copy_(self.block(x + torch.zeros_like(x)))
        return kept


def main() -> None:
    from msprobe.pytorch import PrecisionDebugger

    torch.manual_seed(3)
    settings = OUT.parent / "small_run.json"
    content = {"task": "statistics", "dump_path": str(OUT), "level": "mix", "rank": [0], "step": [0], "statistics": {"scope": []}}
    settings.write_text(json.dumps(content))
    debugger = PrecisionDebugger(str(settings))
    model = Model()
    optimizer = torch.optim.AdamW(model.block.parameters(), lr=1e-2)
    debugger.start(model, rank_id=0)
    model(torch.tensor([1, 4, 5])).square().sum().backward()
    optimizer.step()
    debugger.stop()
    debugger.step()


if __name__ == "__main__":
    main()
