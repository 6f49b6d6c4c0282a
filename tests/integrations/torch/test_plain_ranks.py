"""What several ranks of a loop that makes no call leave on disk; their numbers are in test_training_cases.py."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_cases as cases
import pytest
import torch
from forkpool import run_ranks
from harness.case import TrainingCase
from harness.faults import drift
from harness.run import training_case

pytestmark = pytest.mark.framework
DDP = TrainingCase("torch_loop", parallelism={"dp": 2}, steps=4)


def test_steps_that_were_asked_for(tmp_path: Path) -> None:
    """Only they are dumped and have gradients written, by every rank; the training is the same."""
    sections = {"dump": {"level": "L0", "step": [1]}, "grad_probe": {"grad_level": "L1", "step": [1]}}
    assert training_case(DDP, tmp_path, sections) == training_case(DDP, tmp_path)
    found = {str(path.relative_to(tmp_path / "probe")) for path in (tmp_path / "probe").rglob("*") if path.is_file()}
    dumped = {name for name in found if name.endswith("dump.json")}
    assert dumped == {f"dump/step1/rank{rank}/dump.json" for rank in (0, 1)}
    assert {name for name in found if "grad_summary" in name} == {f"grad_probe/rank{rank}/grad_summary_1.csv" for rank in (0, 1)}


@pytest.mark.slow
def test_replicas_that_differ_start_an_incident(tmp_path: Path) -> None:
    """A rank of DDP whose parameters drift: the lowest rank of the group says so and leaves an incident. Others hear of it
    while they train."""
    sections = {
        "monitor": {"gradients": True, "parameters": True, "replica_check": {"interval": 1}},
        "incident": {"enabled": True, "capture_level": "L0"},
        "rules": [{"rule": "replica_mismatch"}],
    }
    training_case(replace(DDP, fault=drift("6.weight")), tmp_path, sections)
    assert list((tmp_path / "probe").glob("incidents/*"))


def _of_batches(same: bool) -> list[tuple[str, str]]:
    rank = torch.distributed.get_rank()
    with cases.launched({"gradients": True, "replica_check": {"interval": 2}}, rules="recommended") as launch:
        model: Any = torch.nn.parallel.DistributedDataParallel(cases.two())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(9):
            model(cases.batch(number, 0 if same else rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.distributed.barrier()
            time.sleep(0.02)
    alerts = [json.loads(line) for file in launch.directory.rglob("alerts.jsonl") for line in file.read_text().splitlines()]
    return [(alert["rule"], alert["name"]) for alert in alerts]


def test_ranks_that_are_given_the_same_batches() -> None:
    """Without a sampler that deals out the data all ranks of DDP have the same: the lowest one says so, once. With own data: nothing."""
    assert run_ranks(2, _of_batches, True) == [[("repeated_batch", "batch")], []]
    assert run_ranks(2, _of_batches, False) == [[], []]
