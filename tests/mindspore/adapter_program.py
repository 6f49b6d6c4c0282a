"""Small trainings in torch's names over MindSpore (the stand-in for MSAdapter), without the probe and with it.

usage: adapter_program.py DUMP_PATH LEVEL TASK [LIST]: under the debugger; prints a digest of all losses and gradients of each
       adapter_program.py: under the monitor and `TrainerMon`, which writes to ``trainer_mon``; prints digests of the weights and, as JSON,
       what the monitor has seen of the last step
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "stand_in"))

import numpy as np
import torch  # the stand-in
import torch.nn as nn
import torch.nn.functional as F

from msprobe.mindspore import PrecisionDebugger, TrainerMon
from msprobe_engine.core.settings.schema import MonitorSettings, ProbeSettings, SinkSettings
from msprobe_engine.core.statistics.rows import SUMSQ
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe


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


def dump(path: str, level: str, task: str, names: str = "") -> None:
    print(train(None))
    config = Path(path).parent / "config.json"
    config.write_text(json.dumps({"task": task, "level": level, "dump_path": path, task: {"list": names.split(",") if names else []}}))
    print(train(PrecisionDebugger(str(config))))


def train_watched(probe=None, monitor=None) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    if probe:
        probe.attach(model, optimizer)
    if monitor:
        monitor.set_monitor(model, optimizer)
    squares = {}
    for step in range(3):
        x = torch.randn(5, 4)
        if probe:
            probe.begin_step(step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), torch.ones(5, 2))
        loss.backward()
        optimizer.step()
        if probe:
            probe.end_step({"loss": loss})
        squares = {name: float(np.square(p.grad.asnumpy(), dtype=np.float64).sum()) for name, p in model.named_parameters()}
    print(hashlib.sha256(b"".join(p.asnumpy().tobytes() for p in model.parameters())).hexdigest())
    return json.dumps(squares)


def monitor() -> None:
    squares = train_watched()
    families = ("parameters", "gradients", "unreduced_gradients", "optimizer_states", "updates", "activations", "activation_gradients")
    settings = MonitorSettings(**dict.fromkeys(families, True))
    probe = MindSporeProbe(ProbeSettings(strict=True, output_dir="out", monitor=settings, sinks=SinkSettings(memory=True)))
    train_watched(probe)
    probe.close()
    Path("monitor_config.json").write_text(json.dumps({"targets": {}, "wg_distribution": True, "mv_distribution": True, "ops": ["norm"]}))
    os.environ["MONITOR_OUTPUT_DIR"] = "trainer_mon"
    trainer_monitor = TrainerMon("monitor_config.json")
    train_watched(None, trainer_monitor)
    trainer_monitor.stop()
    frame = probe.frames[-1]
    print(json.dumps({f"{s.family}/{s.name}/{s.phase}": float(frame.rows[s.ref.row][SUMSQ]) for s in frame.samples}))
    print(squares)


dump(*sys.argv[1:]) if sys.argv[1:] else monitor()
