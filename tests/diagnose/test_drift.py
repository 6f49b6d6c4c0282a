"""Replicas of a real training over two ranks (DistributedDataParallel, gloo): a weight of one rank moved by 1e-6 is found in that run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_engine.diagnose.run import diagnose

pytest.importorskip("torch")

JOB = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from msprobe.pytorch import PrecisionDebugger

rank, root, drift = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "drift"
dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
debugger = PrecisionDebugger(config_path=f"{root}/config.json")
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(3):
    torch.manual_seed(100 + step * 10 + rank)
    debugger.start(model=net)
    loss = ((model(torch.randn(4, 8)) - torch.randn(4, 4)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if drift and step == 1 and rank == 1:
        with torch.no_grad():
            net[3].weight[0, 0] += 1e-6
    debugger.stop()
    debugger.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["drift", "clean"])
def test_replicas_that_drift(tmp_path: Path, kind: str) -> None:
    """The step after it, the module and the rank's parameter are named; a training without a drift has no finding."""
    config = {"task": "statistics", "dump_path": str(tmp_path / "dump"), "rank": [], "step": [], "level": "L0"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"statistics": {"summary_mode": "statistics"}}))
    (tmp_path / "job.py").write_text(JOB)
    jobs = [subprocess.Popen([sys.executable, str(tmp_path / "job.py"), str(rank), str(tmp_path), kind]) for rank in range(2)]
    assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    found = diagnose(tmp_path / "dump")
    if kind == "clean":
        assert found.finding == "none"
        return
    assert found.finding == "desync"
    assert found.first_suspect is not None
    assert (found.first_suspect.step, found.first_suspect.module) == (2, "3")
    assert found.first_suspect.tensor.endswith("parameters.weight")
