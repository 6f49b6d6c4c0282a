"""Trains a small model in torch's names over MindSpore (the stand-in for MSAdapter) without the monitor, with it and with `TrainerMon`, and
prints digests of the weights and, as JSON, what the monitor has seen of the last step. `TrainerMon` writes to ``trainer_mon``.

usage: adapter_monitoring.py
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

from msprobe.mindspore import TrainerMon
from msprobe_engine.rows import SUMSQ
from msprobe_engine.settings.schema import MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.mindspore.probe import MindSporeProbe


def train(probe=None, monitor=None) -> str:
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


def main() -> None:
    squares = train()
    families = ("parameters", "gradients", "unreduced_gradients", "optimizer_states", "updates", "activations", "activation_gradients")
    settings = MonitorSettings(**dict.fromkeys(families, True))
    probe = MindSporeProbe(ProbeSettings(strict=True, output_dir="out", monitor=settings, sinks=SinkSettings(memory=True)))
    train(probe)
    probe.close()
    Path("monitor_config.json").write_text(json.dumps({"targets": {}, "wg_distribution": True, "mv_distribution": True, "ops": ["norm"]}))
    os.environ["MONITOR_OUTPUT_DIR"] = "trainer_mon"
    monitor = TrainerMon("monitor_config.json")
    train(None, monitor)
    monitor.stop()
    frame = probe.frames[-1]
    print(json.dumps({f"{s.family}/{s.name}/{s.phase}": float(frame.rows[s.ref.row][SUMSQ]) for s in frame.samples}))
    print(squares)


main()
