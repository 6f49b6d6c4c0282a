"""Replicas of a real training over two ranks (DistributedDataParallel, gloo): a weight of one rank moved by 1e-6 is found in that run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forkpool import run_ranks

from msprobe_engine.find.run import diagnose

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo")  # every optimizer imports it: once here instead of in every forked rank


def job(root: Path, drift: bool) -> None:
    """Three steps of this rank, dumped."""
    from msprobe.pytorch import PrecisionDebugger

    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    PrecisionDebugger._instance = None
    debugger = PrecisionDebugger(config_path=str(root / "config.json"))
    model = torch.nn.parallel.DistributedDataParallel(net)
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
    debugger._at_exit()  # a forked rank ends without it


@pytest.mark.parametrize("kind", ["drift", "clean"])
def test_replicas_that_drift(tmp_path: Path, kind: str) -> None:
    """The step after it, the module and the rank's parameter are named; a training without a drift has no finding."""
    config = {"task": "statistics", "dump_path": str(tmp_path / "dump"), "rank": [], "step": [], "level": "L0"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"statistics": {"summary_mode": "statistics"}}))
    run_ranks(2, job, tmp_path, kind == "drift")
    found = diagnose(tmp_path / "dump")
    if kind == "clean":
        assert found.finding == "none"
        return
    assert found.finding == "desync"
    assert found.first_suspect is not None
    assert (found.first_suspect.step, found.first_suspect.module) == (2, "3")
    assert found.first_suspect.tensor.endswith("parameters.weight")
