"""Rank 1 of two is killed in step 5 of a training with FSDP2; run as a program: ``dead_rank.py WHEN OUTPUT INIT``.

WHEN: ``backward`` (before the backward pass: rank 0 fails in a collective), ``sum`` (after the update, before rank 1 has sent its rows:
the step of rank 0 is whole, its numbers cannot be), ``nan`` (the same, and rank 0 has a NaN in its own part of a gradient).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "monitor_torch"))
import parameter_cases as pc

from msprobe_engine.core.settings.schema import JsonLinesSettings, MonitorSettings, ProbeSettings, RuleSettings, SinkSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe

LAST = 5
when, output, init = sys.argv[1:]
rank = 0 if os.fork() else 1
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=2)
model = pc.wrapped("fsdp2", pc.net())
optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
probe = TorchProbe(
    ProbeSettings(
        output_dir=output,
        monitor=MonitorSettings(gradients=True, parameters=True, updates=True, collectives=True, histograms=("param_updated",)),
        rules=(RuleSettings(rule="extreme_value", args={"threshold": 1e3}), RuleSettings(rule="nan_inf")),
        sinks=SinkSettings(jsonl=JsonLinesSettings(enabled=True)),
    )
)
probe.attach(model, optimizer)
make_empty = torch.empty


def make_huge(*args: object, **kwargs: object) -> torch.Tensor:
    """What the memory of an output that was never filled may hold."""
    return make_empty(*args, **kwargs).fill_(1e30)  # type: ignore[call-overload, no-any-return]


for step in range(LAST + 1):
    probe.begin_step(step)
    loss = model(pc.data(step)).square().mean()
    if step == LAST and when == "backward":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.empty = make_huge
    loss.backward()
    if step == LAST and when == "nan" and rank == 0:
        model.a.weight.grad.to_local()[0, 0] = float("nan")  # type: ignore[union-attr, operator]
    optimizer.step()
    if step == LAST and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    probe.end_step({"loss": loss})
    optimizer.zero_grad()
probe.close()
