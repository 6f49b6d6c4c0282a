"""One gradient that is off moves the norm that all are clipped by: the update that differs by another factor than most is named first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.find.run import diagnose


def tensor(value: float) -> dict[str, Any]:
    four = {"Max": value, "Min": -value, "Mean": value / 64, "Norm": 3 * value}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [8, 8], **four, "requires_grad": False}


def run(root: Path, factors: Sequence[float]) -> Path:
    """One step that updates a parameter for each factor, whose first moments are these times what they should be."""
    records: dict[str, Any] = {
        "Module.up.Linear.forward.0": {"input_args": [tensor(1.0)], "input_kwargs": {}, "output": [tensor(3.0)]},
        "Module.up.Linear.backward.0": {"input": [tensor(0.25)], "output": [tensor(0.5)]},
    }
    for number, factor in enumerate(factors):
        moment = {"input_args": [tensor(0.0)], "input_kwargs": {}, "output": [tensor((1 + number) * 0.1 * factor)]}
        records[f"Tensor.lerp_.{number}.forward"] = moment
    directory = root / "step0" / "rank0"
    directory.mkdir(parents=True)
    header = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    (directory / "dump.json").write_text(json.dumps(header | {"data": records}))
    (directory / "construct.json").write_text(json.dumps(dict.fromkeys(records)))
    (directory / "stack.json").write_text("{}")
    return root


@pytest.mark.parametrize(
    ("factors", "named"),
    [
        ((0.8, 0.8, 0.8, 1.6, 0.8), 3),  # one is off, and all are clipped by more
        ((0.8, 0.8, 0.8, 0.8, 0.8), 0),  # the clipping itself is off
        ((0.8, 1.0, 1.0, 1.6, 1.0), 0),  # two are off
        ((0.8, 0.8, 0.8, 0.803, 0.8), 0),  # rounding of 16 bits moves one of them
    ],
)
def test_the_update_that_is_off_by_another_factor(tmp_path: Path, factors: tuple[float, ...], named: int) -> None:
    """Most moments off by one factor follow from what is off by another one; without such, the first is named."""
    found = diagnose(run(tmp_path / "target", factors), run(tmp_path / "golden", [1.0] * len(factors)))
    assert found.first_suspect is not None
    assert found.first_suspect.record == f"Tensor.lerp_.{named}.forward"
