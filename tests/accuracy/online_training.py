"""A training whose calls are checked online: python online_training.py CONFIG STEPS [PAUSE]. Prints a digest of the weights at its end.

Ranks of RANK and WORLD_SIZE train together (gloo). CONFIG ``-``: without the probe.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional

from msprobe.pytorch import PrecisionDebugger


class Model(nn.Module):
    """Attention with a causal mask, dropout, operations in place, a tensor that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.qkv = nn.Linear(32, 96)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) * 32**-0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        x = x + self.dropout(functional.gelu(weights @ v))
        x = (x * x).clamp_(max=10.0) + x.to(torch.bfloat16).float()
        out: torch.Tensor = self.head(x)
        return out


def main() -> None:
    """Train."""
    config, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if together:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = Model()
    if together:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + int(os.environ.get("RANK", "0")))
    debugger = None if config == "-" else PrecisionDebugger(config)
    for step in range(steps):
        if debugger is not None:
            debugger.start(model)
        tokens = torch.randint(0, 50, (2, 16))
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if debugger is not None:
            debugger.stop()
            debugger.step()
        print("step", step, flush=True)
        time.sleep(pause)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print("weights", digest, flush=True)
    if together:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
