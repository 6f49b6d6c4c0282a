"""A rank that dies in a step: what the others write of that step is marked as not complete, and holds no number that is not true.

Numbers of sharded tensors that were not merged over the ranks are left out, as are the norms over them, and the frame says how many; what
a collective that failed was to fill has no statistics, and makes no alert. The message says that a rank has ended.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.framework
LAST = 5


def last_frame(tmp_path: Path, when: str) -> tuple[dict[str, Any], dict[str, Any], str, Path]:
    """The last two frames of the rank that stays, what it said, and its directory of CSV files."""
    program = Path(__file__).with_name("dead_rank.py")
    output = tmp_path / "out"
    done = subprocess.run([sys.executable, program, when, output, tmp_path / "init"], capture_output=True, text=True, timeout=240)
    (file,) = output.glob("**/rank0.jsonl")
    frames = {line["step"]: line for line in map(json.loads, file.read_text().splitlines()) if "step" in line}
    (folder,) = (output / "monitor").glob("*-rank0-*")
    return frames[LAST - 1], frames[LAST], done.stderr + done.stdout, folder


def steps_of(folder: Path, family: str) -> dict[str, set[int]]:
    """Name -> steps that have a line."""
    found: dict[str, set[int]] = {}
    for file in folder.glob(f"{family}_*.csv"):
        for row in csv.DictReader(file.open()):
            found.setdefault(row["name"], set()).add(int(row["step"]))
    return found


def sharded(frame: dict[str, Any]) -> list[dict[str, Any]]:
    """Samples of tensors of which other ranks hold the rest."""
    return [sample for sample in frame["samples"] if "scope" in sample.get("extra", {})]


@pytest.mark.slow
def test_numbers_without_those_of_a_dead_rank_are_left_out(tmp_path: Path) -> None:
    """The rows of one shard are not written as those of the whole: not in JSON lines, not in CSV, not as a norm."""
    before, last, said, folder = last_frame(tmp_path, "sum")
    assert before["complete"]
    assert not last["complete"]
    assert not {"param_norm", "update_norm", "grad_norm"} & set(last["scalars"])
    assert {"param_norm", "update_norm", "grad_norm"} <= set(before["scalars"])
    assert not sharded(last)
    ((reason, count),) = last["lost"].items()
    assert reason == "statistics of sharded tensors, not merged over ranks 0-1"
    assert count == len(sharded(before))
    assert all(max(steps) == LAST - 1 for steps in steps_of(folder, "param_updated").values())
    assert "has ended or cannot be reached" in said
    assert "is the probe off" not in said


@pytest.mark.slow
def test_a_nan_of_this_rank_is_kept(tmp_path: Path) -> None:
    """Whatever the other ranks hold, the whole tensor has it; no finite number is said of the tensor."""
    _, last, said, _ = last_frame(tmp_path, "nan")
    assert not last["complete"]
    assert "ALERT nan_inf" in said
    kept = {sample["name"]: sample for sample in sharded(last) if sample["family"] == "grad_reduced"}
    assert list(kept) == ["a.weight"]
    assert kept["a.weight"]["extra"]["scope"] == "unknown"
    assert kept["a.weight"]["shape"] == [13, 8]
    assert {kept["a.weight"][op] for op in ("norm", "min", "max", "mean")} == {"NaN"}


@pytest.mark.slow
def test_what_a_failed_collective_was_to_fill_has_no_statistics(tmp_path: Path) -> None:
    """The memory of its output holds anything."""
    before, last, said, _ = last_frame(tmp_path, "backward")
    assert before["complete"]
    assert not last["complete"]
    assert "ALERT" not in said
    assert not last.get("alerts")
    assert last["lost"]["outputs of collectives that failed"] >= 1
    outputs = [s for s in last["samples"] if s["family"] == "other"]
    assert outputs
    assert all(abs(s["norm"]) < 1e3 for s in outputs)
