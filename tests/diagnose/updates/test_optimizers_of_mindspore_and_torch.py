"""`diagnose` of runs of MindSpore and PyTorch whose parameters part after the first update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.find.difference.optimizer.updates import TWO_OPTIMIZERS
from msprobe_engine.find.run import diagnose


def _tensor(framework: str, value: float, shape: tuple[int, ...]) -> dict[str, Any]:
    kind, dtype = ("mindspore.Tensor", "Float32") if framework == "mindspore" else ("torch.Tensor", "torch.float32")
    four = {"Max": value, "Min": -value, "Mean": value / 8, "Norm": 3 * value}
    return {"type": kind, "dtype": dtype, "shape": list(shape), **four, "requires_grad": False}


def _run(root: Path, framework: str, updated: float) -> Path:
    """Two steps of one layer, whose weight and output are this in the second step."""
    name = "Cell.up.Dense.forward.0" if framework == "mindspore" else "Module.up.Linear.forward.0"
    for step, value in enumerate((1.0, updated)):
        record = {
            "input_args": [_tensor(framework, 2.0, (2, 8))],
            "input_kwargs": {},
            "parameters": {"weight": _tensor(framework, value, (16, 8))},
            "output": [_tensor(framework, 3.0 * value, (2, 16))],
        }
        directory = root / f"step{step}" / "rank0"
        directory.mkdir(parents=True)
        header = {"task": "statistics", "level": "L0", "framework": framework, "dump_data_dir": None}
        (directory / "dump.json").write_text(json.dumps(header | {"data": {name: record}}))
        (directory / "construct.json").write_text(json.dumps({name: None}))
        (directory / "stack.json").write_text("{}")
    return root


@pytest.mark.parametrize("golden", ["mindspore", "pytorch"])
def test_optimizers_of_two_frameworks_are_named(tmp_path: Path, golden: str) -> None:
    """A parameter that parts behind the first update of runs of two frameworks: the evidence asks for the rule of the optimizers."""
    found = diagnose(_run(tmp_path / "target", "mindspore", 1.5), _run(tmp_path / "golden", golden, 1.25))
    assert found.first_suspect is not None
    assert found.first_suspect.step == 1
    assert (TWO_OPTIMIZERS in found.evidence) == (golden == "pytorch")
