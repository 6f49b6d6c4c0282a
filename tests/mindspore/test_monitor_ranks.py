"""Two processes started by msrun: files per rank, collectives, and replicas that drift apart."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest


@pytest.fixture
def out(two_ranks: Path) -> Path:
    """What two ranks have written."""
    return two_ranks / "out"


def table(out: Path, rank: int, family: str) -> list[dict[str, str]]:
    """Rows of a CSV file."""
    (path,) = (out / "monitor").glob(f"*-rank{rank}-*/{family}_0-99.csv")
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_rank_has_its_files(out: Path) -> None:
    """Reduced gradients are the same on both ranks, those before the reduction are not."""
    reduced = [[row["norm"] for row in table(out, rank, "grad_reduced")] for rank in (0, 1)]
    before = [[row["norm"] for row in table(out, rank, "grad_unreduced")] for rank in (0, 1)]
    assert len(reduced[0]) == 72
    assert reduced[0][:12] == reduced[1][:12]
    assert before[0] != before[1]


def test_collectives(out: Path) -> None:
    """Operators and functions have a row for what goes in and what comes out, and say where they were called."""
    rows = [row for row in table(out, 0, "other") if row["step"] == "0"]
    tags = [row["tag"] for row in rows]
    assert tags[:2] == ["all_reduce/rank0/pre_0_0", "all_reduce/rank0/post_0_0"]
    assert tags[-2:] == ["all_reduce/rank0/pre_6_0", "all_reduce/rank0/post_6_0"]
    assert len(tags) == 14
    step = json.loads((out / "jsonl/rank0.jsonl").read_text().splitlines()[1])
    extra = [sample["extra"] for sample in step["samples"] if sample["family"] == "other"]
    assert all("monitor_ranks_program.py[" in facts["site"] for facts in extra)
    assert {facts["group"] for facts in extra} == {"0-1"}


def test_replicas_that_drift_apart(out: Path) -> None:
    """The weight that one rank has changed is named, by the lowest rank, from that step on; gradients were the same."""
    first = [json.loads(line) for line in next((out / "monitor").glob("*-rank0-*/alerts.jsonl")).read_text().splitlines()]
    found = [alert for alert in first if alert["rule"] == "replica_mismatch"]
    assert [(a["name"], a["step"]) for a in found][:1] == [("second.bias", 2)]
    assert "param" in found[0]["kind"]
    assert not list((out / "monitor").glob("*-rank1-*/alerts.jsonl"))
    assert not (out / "replicas").exists()


def test_all_ranks_write_the_incident(out: Path) -> None:
    """An alert of rank 0 makes both ranks write their last steps into one directory."""
    (incident,) = [path for path in (out / "incidents").iterdir() if path.name.startswith("step")]
    assert {path.name for path in incident.glob("rank*.json")} == {"rank0.json", "rank1.json"}
