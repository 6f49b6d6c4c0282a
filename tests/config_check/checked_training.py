"""A small training as a script that a config check looks at: ``checked_training.py PACK [KEY=VALUE ...]``. Runs alone or in ranks.

Without a pack it only trains. The last line printed is a hash of weights and losses.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

DEFAULTS = {"seed": "1", "steps": "3", "patches": "1", "tool": "ours", "micro_steps": "1", "extra": "", "bit": "", "sample": "", "odd": ""}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None, **_: object) -> torch.Tensor:
        return (self.dropout(self.linear(self.embedding(tokens))) ** 2).mean() + (0 if labels is None else labels.float().mean())


def plant(given: dict[str, str], model: Model) -> None:
    """One difference, where a test asks for it."""
    if given["bit"]:
        with torch.no_grad():
            model.linear.weight.view(torch.int32)[2, 3] ^= 1
    if given["extra"] == "torch.rand":
        torch.rand(1)
    if given["extra"] == "random.shuffle":
        random.shuffle([1, 2, 3])


def main(path: str, given: dict[str, str]) -> str:
    if given["tool"] == "existing":
        from msprobe.core.config_check import ConfigChecker
    else:
        from msprobe_integrations.config_checker import ConfigChecker
    if path and given["patches"] == "1":
        ConfigChecker.apply_patches()
    rank = int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(int(given["seed"]))
    random.seed(2)
    np.random.seed(3)
    model = Model()
    plant(given, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if path and given["tool"] == "existing":
        ConfigChecker(model, None, path)
    elif path:
        steps = given["micro_steps"]
        ConfigChecker(model, None, path, micro_steps=int(steps) if steps.isdigit() else steps)
    digest = hashlib.sha256()
    for step in range(int(given["steps"])):
        tokens = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(100 * rank + step))
        if given["sample"] == str(rank):
            tokens[2, 1] += 1 if tokens[2, 1] < 31 else -1
        odd = {"none": None, "nan": torch.tensor([float("nan")]), "empty": torch.zeros(0, 3), "meta": torch.ones(2, device="meta")}
        loss = model(tokens, labels=tokens, **(odd if given["odd"] else {}))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        digest.update(loss.detach().numpy().tobytes())
    for one in model.state_dict().values():
        digest.update(one.numpy().tobytes())
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return digest.hexdigest()


if __name__ == "__main__":
    pack, *rest = sys.argv[1:]
    print(main(pack, {**DEFAULTS, **dict(item.split("=", 1) for item in rest)}))
