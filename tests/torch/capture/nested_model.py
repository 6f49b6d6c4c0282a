"""A model whose modules lie DEPTH deep in each other trains two steps; run as a program: ``nested_model.py KIND DEPTH [ROOM]``.

KIND: ``bare``, ``hooks`` (empty forward hooks of the program's own), ``L0``, ``L1``, ``mix`` (dumps) or ``monitor``. With ROOM the program
sets its limit of recursion itself, after the probe's hooks are on: to that many frames above its own.

Prints, as JSON, the bits of the last loss, how many messages of the probe there were, and the limit of recursion before, during and after.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from typing import Any

import torch
from torch import nn

from msprobe.pytorch import PrecisionDebugger
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 1.0


def frames() -> int:
    frame: Any = sys._getframe(1)
    count = 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


kind, depth = sys.argv[1], int(sys.argv[2])
room = int(sys.argv[3]) if len(sys.argv) > 3 else 0
said: list[str] = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("msprobe").addHandler(handler)
torch.manual_seed(0)
model: nn.Module = nn.Linear(4, 4)
for _ in range(depth):
    model = Block(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
limits = [sys.getrecursionlimit()]
debugger = probe = None
place = tempfile.mkdtemp()
if kind == "hooks":
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
        module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
elif kind == "monitor":
    sinks = SinkSettings(csv=CsvSettings(enabled=False))
    probe = TorchProbe(ProbeSettings(output_dir=place, monitor=MonitorSettings(gradients=True, activations=True), sinks=sinks))
    probe.attach(model, optimizer)
elif kind != "bare":
    section = {"scope": [], "list": [], "data_mode": ["all"]}
    settings = {"task": "statistics", "dump_path": place, "rank": [], "step": [], "level": kind, "statistics": section}
    with open(f"{place}/config.json", "w") as file:
        json.dump(settings, file)
    debugger = PrecisionDebugger(f"{place}/config.json")
for step in range(2):
    if probe is not None:
        probe.begin_step(step)
    if debugger is not None:
        debugger.start(model)
    limits.append(sys.getrecursionlimit())
    if room:
        sys.setrecursionlimit(frames() + room)
    out = model(torch.ones(3, 4))
    if room:
        sys.setrecursionlimit(limits[-1])
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if probe is not None:
        probe.end_step()
    if debugger is not None:
        debugger.stop()
        debugger.step()
if probe is not None:
    probe.close()
del debugger
limits.append(sys.getrecursionlimit())
print(json.dumps({"loss": loss.detach().numpy().tobytes().hex(), "said": said, "limits": limits}))
