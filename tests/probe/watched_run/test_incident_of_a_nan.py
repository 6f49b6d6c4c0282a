"""A NaN in a real run: alert, incident directory of all ranks, armed capture, and the command that names its origin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import probe_ranks as pr
import pytest
import torch
import torch.distributed as dist
from torch import nn

from msprobe_engine.core.settings.schema import IncidentSettings, MonitorSettings, ProbeSettings
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
BAD_STEP = 3


class Sick(nn.Module):
    """Divides by what another rank or step makes zero."""

    def __init__(self) -> None:
        super().__init__()
        self.sick = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.zeros_like(x) * 0 if self.sick else x


def train(output: str, level: str, bad_rank: int, strict: bool) -> list[str]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Sick(), nn.Linear(4, 4))
    model = nn.parallel.DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe(
        ProbeSettings(output_dir=output, strict=strict, monitor=MonitorSettings(), incident=IncidentSettings(level=level, ring_steps=4))
    )
    probe.attach(model, optimizer)
    rank = int(os.environ.get("RANK", 0))
    for step in range(8):
        probe.begin_step(step)
        net[1].sick = step == BAD_STEP and rank == bad_rank
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        if step == BAD_STEP:
            optimizer.zero_grad()  # the job skips the bad update and goes on
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step({"loss": loss})
    probe.close()
    return list(probe.faults.disabled)


def analyze(directory: Path, output: Path) -> str:
    """What ``msprobe nan_analyze`` prints."""
    command = [sys.executable, "-m", "msprobe_engine.cli", "nan_analyze", "-i", str(directory), "-o", str(output)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False).stdout


@pytest.mark.parametrize("level", ["mix", "L1"])
def test_one_process(tmp_path: Path, level: str) -> None:
    """A NaN at a step gives an alert on the console, an incident with the ring's steps, an armed dump of a later step, and
    nan_analyze names the operation that made it."""
    done = pr.run(train, str(tmp_path), level, 0, True, directory=tmp_path)[0]
    assert done.lines("ALERT")
    assert len(done.lines("INCIDENT")) == 1
    (directory,) = (p for p in (tmp_path / "incidents").iterdir() if p.name.startswith("step"))
    incident = json.loads((directory / "incident.json").read_text())
    assert incident["ranks_complete"] == [0]
    dump = open_dump(directory)
    assert {BAD_STEP - 1, BAD_STEP} < set(dump.steps)
    assert dump.steps[-1] > BAD_STEP  # the armed capture
    assert all(dump.load(s).complete for s in dump.steps)
    text = analyze(directory, tmp_path / "out")
    assert f"step {BAD_STEP}" in text
    assert "Tensor.truediv" in text or "Tensor.__truediv__" in text or "Tensor.div" in text, text


@pytest.mark.slow
def test_one_bad_rank_of_two(tmp_path: Path) -> None:
    """With a NaN on one rank only, both ranks write their ring into one directory, and the origin is named with its rank."""
    done = pr.run(train, str(tmp_path), "mix", 1, True, ranks=2, directory=tmp_path)
    assert [o.value for o in done] == [[], []]
    (directory,) = (p for p in (tmp_path / "incidents").iterdir() if p.name.startswith("step"))
    incident = json.loads((directory / "incident.json").read_text())
    assert incident["ranks_complete"] == [0, 1]
    dump = open_dump(directory)
    assert dump.ranks(BAD_STEP) == [0, 1]
    assert all(dump.load(s, r).complete for s in dump.steps for r in dump.ranks(s))
    text = analyze(directory, tmp_path / "out")
    assert "rank 1" in text
    assert f"step {BAD_STEP}" in text
