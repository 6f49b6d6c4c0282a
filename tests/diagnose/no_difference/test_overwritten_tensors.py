"""What a tensor held before a call that writes over it goes nowhere, and is no difference of the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.find.run import diagnose


def tensor(value: float) -> dict[str, Any]:
    numbers = {"Max": value, "Min": -value, "Mean": 0.1 * value, "Norm": 2 * value}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 4], "requires_grad": False} | numbers


def write(root: Path, call: str, before: float, given: list[float], result: float) -> Path:
    """One call that writes over memory that held `before`, and a call that uses what it leaves."""
    data = {
        f"Tensor.{call}.0.forward": {"input_args": [tensor(before), *map(tensor, given)], "input_kwargs": {}, "output": [tensor(result)]},
        "Tensor.exp.0.forward": {"input_args": [tensor(result)], "input_kwargs": {}, "output": [tensor(3 * result)]},
    }
    place = root / "step0" / "rank0"
    place.mkdir(parents=True)
    (place / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L1", "framework": "pytorch", "data": data}))
    return root


@pytest.mark.parametrize(
    ("call", "given", "same"), [("zero_", [], True), ("fill_", [], True), ("copy_", [1.0], True), ("mul_", [1.0], False)]
)
def test_memory_that_is_written_over(call: str, given: list[float], same: bool, tmp_path: Path) -> None:
    """Another content of it before is nothing for calls that do not read it, and a finding for one that does."""
    runs = [write(tmp_path / name, call, before, given, 1.0) for name, before in (("target", 7.0), ("golden", 5.0))]
    assert (diagnose(*runs).finding == "none") == same
