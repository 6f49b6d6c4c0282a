"""Trainings of one process with a parameter that is left out: ``left_out_run.py DIRECTORY``. Each leaves an output directory named
``{level}-{kind}`` with a dump of steps 0 and 3 (no dump for level ``none``) and monitor output: ``good``, ``no-update`` (the bias of the
norm is in no optimizer), ``frozen`` (the bias of the last layer requires no gradient)."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

import torch
from torch import nn

STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.fc = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(self.embed(ids)))


def train(root: Path, level: str, kind: str) -> None:
    from msprobe.pytorch import TorchProbe

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    if kind == "frozen":
        model.fc.bias.requires_grad_(False)
    updated = [parameter for name, parameter in model.named_parameters() if (kind, name) != ("no-update", "norm.bias")]
    optimizer = torch.optim.AdamW(updated, lr=1e-2, foreach=False)
    content: dict[str, object] = {
        "output_dir": str(root / f"{level}-{kind}"),
        "monitor": {"gradients": True, "parameters": True},
        "sinks": {"csv": {"enabled": True}, "jsonl": {"enabled": True}},
    }
    if level != "none":
        content["dump"] = {"level": level, "step": [0, 3], "task": "statistics"}
    settings = root / f"{level}-{kind}.yaml"
    settings.write_text(json.dumps(content))
    probe = TorchProbe.from_config(str(settings))
    probe.attach(model, optimizer)
    batches = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        ids = torch.randint(0, 16, (2, 5), generator=batches)
        probe.begin_step(step)
        loss = nn.functional.cross_entropy(model(ids).view(-1, 16), ids.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step({"loss": loss.detach()})
    probe.close()


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ended = []
    for level in ("mix", "L0", "none"):
        for kind in ("good", "no-update", "frozen"):
            process = context.Process(target=train, args=(Path(sys.argv[1]), level, kind))
            process.start()
            process.join()
            ended.append(abs(process.exitcode or 0))
    sys.exit(max(ended))
