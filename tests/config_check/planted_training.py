"""A training of plain torch with what `test_planted_differences` plants in it: ``planted_training.py PACK SCRIPT``,
in ranks, with what is planted in the variable ``PLANTED`` (words of the command line would be a difference of their own)."""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from msprobe_integrations.config_checker import ConfigChecker


def main(pack: str, script: str, what: set[str]) -> None:
    """Two forward passes are collected."""
    ConfigChecker.apply_patches()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    random.seed(2)
    np.random.seed(3)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    if "bit" in what:
        with torch.no_grad():
            model[1].weight.view(torch.int32)[2, 3] ^= 1
    if "buffer" in what:
        model.register_buffer("extra", torch.ones(2))
    if "call" in what:
        random.random()
    if "state" in what:
        np.random.default_rng()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6 if "eps" in what else 1e-8)
    ConfigChecker(model, [script], pack, micro_steps=2)
    for step in range(2):
        tokens = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(100 * rank + step))
        if "sample" in what and (step, rank) == (1, 1):
            tokens[2, 1] = (tokens[2, 1] + 1) % 16
        if "order" in what and (step, rank) == (0, 0):
            tokens = tokens[[1, 0, 2, 3]]
        model(tokens).sum().backward()
        optimizer.zero_grad()  # no update: only what was planted differs in the second pass
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], set(os.environ["PLANTED"].split()))
