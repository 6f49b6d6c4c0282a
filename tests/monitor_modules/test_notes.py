"""stack_info.csv and module_struct.json of the first monitored step."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from watched import monitor, watch

pytestmark = pytest.mark.framework


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.pair(self.fc(x), None)
        return a + b if b is not None else a


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        return x * 2, y


def test_structure(tmp_path: Path) -> None:
    """Shapes and dtypes of inputs, outputs and their gradients, in the words of the existing tool, from the first step that is due;
    the training goes on, and later steps have no hooks."""
    model = Net()
    hooks = []

    def step(_: int) -> None:
        hooks.append(len(model.fc._forward_pre_hooks))
        model(torch.ones(2, 4)).sum().backward()

    watch(model, monitor(print_struct=True, start_step=1), step, steps=4, output=tmp_path)
    found = json.loads((tmp_path / "monitor/module_struct/rank0/module_struct.json").read_text())
    of_x, of_y = "size=(2, 4), dtype=torch.float32", "size=(2, 3), dtype=torch.float32"
    assert found["0:fc"] == {
        "input": {"config": "list[1]", "0": of_x},
        "output": {"config": "tensor", "tensor": of_y},
        "input_grad": {"config": "tuple[1]", "0": "<class 'NoneType'>"},
        "output_grad": {"config": "tuple[1]", "0": of_y},
    }
    assert found["0:pair"]["output"] == {"config": "tuple[2]", "0": of_y, "1": "<class 'NoneType'>"}
    assert list(found) == ["0:", "0:fc", "0:pair"]
    assert hooks == [0, 1, 0, 0]


def test_stacks(tmp_path: Path) -> None:
    """One call stack per module, innermost frame first, without frames of this package."""
    model = Net()
    watch(model, monitor(stack_info=True), lambda _: model(torch.ones(2, 4)), steps=2, output=tmp_path)
    (path,) = (tmp_path / "monitor").glob("*-rank0-*/stack_info.csv")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["module_name"] for r in rows] == ["0:", "0:fc", "0:pair"]
    first = rows[1]["stack_info"]
    assert first.startswith(f"File {__file__}, line ")
    assert "in forward, \n a, b = self.pair(self.fc(x), None)" in first
    assert "msprobe_integrations" not in first
