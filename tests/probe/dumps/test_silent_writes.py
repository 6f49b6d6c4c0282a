"""Operators that write without a new version: what the dump says of a tensor afterwards is its value by then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]


def records(tmp_path: Path, program: Any) -> tuple[dict[str, Any], Path]:
    """Records of one step of a program at level L1 with task tensor, and where they are."""
    config = {"task": "tensor", "dump_path": str(tmp_path / "out"), "rank": [], "step": [], "level": "L1", "tensor": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    debugger = PrecisionDebugger(str(tmp_path / "config.json"))
    debugger.start()
    program()
    debugger.stop()
    debugger.step()
    debugger.run.at_exit()
    (file,) = (tmp_path / "out").rglob("dump.json")
    return json.loads(file.read_text())["data"], file.parent


def saved(directory: Path, item: dict[str, Any]) -> torch.Tensor:
    """A saved tensor."""
    made: torch.Tensor = torch.load(directory / "dump_tensor_data" / item["data_name"])
    return made


def test_gradients_after_unscaling(tmp_path: Path) -> None:
    """Gradients are read anew after GradScaler has unscaled them."""
    grads = [torch.full((4,), 8.0), torch.full((2, 2), 16.0)]

    def program() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor(0.25))
        torch._foreach_norm(grads, 2)

    data, directory = records(tmp_path, program)
    before = data["Torch._amp_foreach_non_finite_check_and_unscale_.0.forward"]["input_args"][0]
    after = data["Torch._foreach_norm.0.forward"]["input_args"][0]
    assert [item["Max"] for item in before] == [8.0, 16.0]
    assert [item["Max"] for item in after] == [2.0, 4.0]
    assert torch.equal(saved(directory, after[1]), torch.full((2, 2), 4.0))


def test_running_statistics_of_the_second_call(tmp_path: Path) -> None:
    """A second batch norm of a step gets the running statistics that the first has written."""
    norm, x = torch.nn.BatchNorm1d(3), torch.randn(8, 3) + 5

    data, _ = records(tmp_path, lambda: norm(norm(x)))
    means = [data[f"Functional.batch_norm.{n}.forward"]["input_args"][1] for n in (0, 1)]
    assert means[0]["Norm"] == 0
    assert means[1]["Norm"] > 0.5


def test_fused_optimizers(tmp_path: Path) -> None:
    """Parameters are read anew after a fused optimizer has written them."""
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True)

    def program() -> None:
        for _ in range(2):
            layer(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    data, directory = records(tmp_path, program)
    first, second = (data[f"Functional.linear.{n}.forward"]["input_args"][1] for n in (0, 1))
    assert not torch.equal(saved(directory, first), saved(directory, second))


def test_operators_of_libraries(tmp_path: Path) -> None:
    """What an operator says to write, without autograd, is read anew."""
    with torch.library._scoped_library("probe_silent", "DEF") as library:
        library.define("fill(Tensor(a!) x) -> ()")
        library.impl("fill", lambda x: x.numpy().fill(7.0), "CPU")
        x = torch.ones(4)

        def program() -> None:
            torch.sin(x)
            torch.ops.probe_silent.fill(x)
            torch.cos(x)

        data, _ = records(tmp_path, program)
    assert data["Torch.cos.0.forward"]["input_args"][0]["Max"] == 7.0
