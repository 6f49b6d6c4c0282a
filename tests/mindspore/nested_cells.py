"""A model whose Cells lie DEPTH deep in each other trains two steps; run as a program: ``nested_cells.py KIND DEPTH``.

KIND: ``bare``, ``L0``, ``mix`` (dumps), ``monitor`` or ``both`` (L0 and the monitor). Prints, as JSON, the bits of the last loss, the
messages of the probe, and the limit of recursion before, during and after.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from typing import Any

import mindspore
import numpy as np
from mindspore import nn

from msprobe.mindspore import PrecisionDebugger
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe


class Block(nn.Cell):
    def __init__(self, inner: Any) -> None:
        super().__init__(auto_prefix=False)  # MindSpore refuses long names of parameters
        self.inner = inner

    def construct(self, x: Any) -> Any:
        return self.inner(x) * 1.0


kind, depth = sys.argv[1], int(sys.argv[2])
sys.setrecursionlimit(1000)  # as Python has it; MindSpore makes it 10,000, which is hours of its own work
said: list[str] = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("msprobe").addHandler(handler)
mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
mindspore.set_seed(0)
model: Any = nn.Dense(4, 4)
for _ in range(depth):
    model = Block(model)
optimizer = nn.SGD(model.trainable_params(), 0.1)
gradients = mindspore.value_and_grad(lambda x: (model(x) ** 2).mean(), None, optimizer.parameters)
limits = [sys.getrecursionlimit()]
debugger: Any = None
probe: Any = None
place = tempfile.mkdtemp()
if kind in ("monitor", "both"):
    sinks = SinkSettings(csv=CsvSettings(enabled=False))
    watched = MonitorSettings(gradients=True, activations=True, activation_gradients=True)
    probe = MindSporeProbe(ProbeSettings(output_dir=place, monitor=watched, sinks=sinks))
    probe.attach(model, optimizer)
if kind in ("L0", "mix", "both"):
    section = {"scope": [], "list": [], "data_mode": ["all"]}
    level = "L0" if kind == "both" else kind
    settings = {"task": "statistics", "dump_path": place, "rank": [], "step": [], "level": level, "statistics": section}
    with open(f"{place}/config.json", "w") as file:
        json.dump(settings, file)
    debugger = PrecisionDebugger(f"{place}/config.json")
loss: Any = None
for step in range(2):
    if probe is not None:
        probe.begin_step(step)
    if debugger is not None:
        debugger.start(model)
    limits.append(sys.getrecursionlimit())
    loss, found = gradients(mindspore.Tensor(np.ones((3, 4), np.float32)))
    optimizer(found)
    if probe is not None:
        probe.end_step()
    if debugger is not None:
        debugger.stop()
        debugger.step()
if probe is not None:
    probe.close()
limits.append(sys.getrecursionlimit())
print(json.dumps({"loss": loss.asnumpy().tobytes().hex(), "said": said, "limits": limits}))
