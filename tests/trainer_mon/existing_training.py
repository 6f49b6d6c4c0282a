"""One small training that runs under this project and under the existing tool alike: ``python existing_training.py config.json STEPS``.

Both have ``from msprobe.pytorch import TrainerMon`` (or, with a third argument ``v2``, `TrainerMonitorV2`); ``MONITOR_OUTPUT_DIR`` says
where files go. The last line of the output is the digest of losses and weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """Two linear layers and a norm, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, two blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(config: str, steps: int, version: str = "", micro_batches: int = 2) -> str:
    """Train; gives a digest of all losses and the weights at the end."""
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.optim.AdamW(nn.Linear(2, 2).parameters())  # another one of the same class
    monitor: Any = None
    if version == "v2":
        from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

        monitor = TrainerMonitorV2(config, fr="pytorch")
        monitor.start(model=net, optimizer=optimizer, grad_acc_steps=micro_batches)
    elif config:
        from msprobe.pytorch import TrainerMon

        monitor = TrainerMon(config, params_have_main_grad=False)
        monitor.set_monitor(net, optimizer=optimizer, grad_acc_steps=micro_batches)
    found = hashlib.sha256()
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            ids = torch.randint(0, 11, (3, 5))
            loss = torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            found.update(loss.detach().numpy().tobytes())
        optimizer.step()
    for parameter in net.parameters():
        found.update(parameter.detach().numpy().tobytes())
    if monitor is not None and hasattr(monitor, "stop"):
        monitor.stop()
    return found.hexdigest()


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")))
