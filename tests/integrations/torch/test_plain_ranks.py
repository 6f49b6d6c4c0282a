"""What several ranks of a loop that makes no call leave on disk; their numbers are in test_training_cases.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
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
