"""Trains a small model in torch's names over MindSpore (the stand-in for MSAdapter) without the probe and with it, and prints a digest of
all losses and gradients of each.

usage: adapter_training.py DUMP_PATH LEVEL TASK [LIST]
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "stand_in"))

import torch  # the stand-in
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(8, 4)
        self.linear2 = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x, scale):
        x = F.relu(self.linear2(self.linear1(x)))
        return self.body(x * scale + x + x @ torch.ones(4, 4))


def train(debugger) -> str:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    found = hashlib.sha256()
    for _ in range(2):
        x, y = torch.randn(3, 8), torch.ones(3, 2)
        if debugger:
            debugger.start(net)
        loss = F.mse_loss(net(x, scale=torch.tensor(0.5)), y)
        torch.value_and_grad(net, None)  # makes a function: no operation
        optimizer.zero_grad()
        loss.backward()
        if debugger:
            debugger.stop()
            debugger.step()
        for tensor in (loss, *(parameter.grad for parameter in net.parameters())):
            found.update(tensor.asnumpy().tobytes())
        optimizer.step()
    return found.hexdigest()


def main(path: str, level: str, task: str, names: str = "") -> None:
    from msprobe.mindspore import PrecisionDebugger

    print(train(None))
    config = Path(path).parent / "config.json"
    config.write_text(json.dumps({"task": task, "level": level, "dump_path": path, task: {"list": names.split(",") if names else []}}))
    print(train(PrecisionDebugger(str(config))))


main(*sys.argv[1:])
