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


def write_gather(root: Path, before: float, gathered: float) -> Path:
    """A buffer that is kept for all gathers (Megatron's) still holds the last one: parts of it, the gather, and who uses what it brings."""
    whole, sent = tensor(before) | {"shape": [16]}, tensor(0.5) | {"shape": [2, 4]}
    data: dict[str, Any] = {
        "Tensor.__getitem__.0.forward": {"input_args": [whole], "input_kwargs": {}, "output": [whole]},
        "Tensor.view.0.forward": {"input_args": [whole], "input_kwargs": {}, "output": [tensor(before)]},
        "Distributed.all_gather_into_tensor.0.forward": {
            "input_args": [None, sent],
            "input_kwargs": {},
            "output": [tensor(gathered), sent],
            "async": False,
        },
        "Tensor.exp.0.forward": {"input_args": [tensor(gathered)], "input_kwargs": {}, "output": [tensor(3 * gathered)]},
    }
    place = root / "step0" / "rank0"
    place.mkdir(parents=True)
    (place / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L1", "framework": "pytorch", "data": data}))
    return root


@pytest.mark.parametrize(("before", "gathered", "same"), [(5.0, 1.0, True), (7.0, 1.0, True), (5.0, 2.0, False)])
def test_a_buffer_that_a_gather_fills(before: float, gathered: float, same: bool, tmp_path: Path) -> None:
    """What the gather before it left there is nothing; what this one brings is compared."""
    golden = write_gather(tmp_path / "golden", 5.0, 1.0)
    assert (diagnose(write_gather(tmp_path / "target", before, gathered), golden).finding == "none") == same
