"""What one run alone changes behind the update of a step, within what round-off may do, is named by what the next step takes in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.find import findings
from msprobe_engine.find.run import diagnose

CLOSE = 1 + 2e-5
"""Much less than a unit of bfloat16, and than what an average of 64 elements shows of it."""


def tensor(value: float) -> dict[str, Any]:
    four = {"Max": value, "Min": -value, "Mean": value / 64, "Norm": 3 * value}
    return {"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": [8, 8], **four, "requires_grad": False}


def call(value: float, result: float, *numbers: float) -> dict[str, Any]:
    arguments = [{"type": "float", "value": number} for number in numbers]
    return {"input_args": [tensor(value), *arguments], "input_kwargs": {}, "output": [tensor(result)]}


def run(root: Path, calls: list[str]) -> Path:
    """Two steps; behind the backward pass an average of 2.0 moves to 2.5, and then by these calls a very little further each."""
    average = 2.0
    for step in (0, 1):
        records: dict[str, Any] = {
            "Module.up.Linear.forward.0": call(1.0 + step, 3.0 + step),
            "Module.up.Linear.backward.0": {"input": [tensor(0.25)], "output": [tensor(0.5)]},
            "Tensor.mul_.0.forward": call(average, average * 1.25, 1.25),
        }
        average *= 1.25
        for number, name in enumerate(calls):
            records[f"Tensor.{name}.{number + (name == 'mul_')}.forward"] = call(average, average * CLOSE, 1.01)
            average *= CLOSE
        directory = root / f"step{step}" / "rank0"
        directory.mkdir(parents=True)
        header = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
        (directory / "dump.json").write_text(json.dumps(header | {"data": records}))
        (directory / "construct.json").write_text(json.dumps(dict.fromkeys(records)))
        (directory / "stack.json").write_text("{}")
    return root


@pytest.mark.parametrize("here", [True, False])
def test_a_change_that_one_run_alone_makes(tmp_path: Path, here: bool) -> None:
    """Both runs come to the same numbers, one goes on from them in place, and the next step begins with that: the call is named."""
    more, less = run(tmp_path / "more", ["mul_"]), run(tmp_path / "less", [])
    found = diagnose(more, less) if here else diagnose(less, more)
    assert found.finding == findings.STRUCTURE
    assert found.first_suspect is not None
    assert (found.first_suspect.step, found.first_suspect.record) == (0, "Tensor.mul_.1.forward")


def test_a_change_of_type(tmp_path: Path) -> None:
    """Calls that only move elements, or give them another type, round otherwise and are no change."""
    found = diagnose(run(tmp_path / "target", ["to", "copy_"]), run(tmp_path / "golden", []))
    assert found.first_suspect is None
