"""Where torch's names stand for MindSpore (MSAdapter): records have torch's names, tensors are read as MindSpore's. MSAdapter itself cannot
be installed here; `stand_in` has what a probe depends on, and runs in a process of its own, where it shadows torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ms_programs
import numpy as np
import pytest

from msprobe_engine.formats.dump.notebook.step_dump import load_rank_directory

PROGRAM = Path(__file__).parents[1] / "adapter_program.py"
FORWARD = [
    "Functional.linear.0.forward", "Module.linear1.Linear.forward.0", "Functional.linear.1.forward", "Module.linear2.Linear.forward.0",
    "Functional.relu.0.forward", "Tensor.__mul__.0.forward", "Tensor.__add__.0.forward", "Torch.ones.0.forward",
    "Tensor.__matmul__.0.forward", "Tensor.__add__.1.forward", "Functional.relu.1.forward", "Module.body.0.ReLU.forward.0",
    "Functional.linear.2.forward", "Module.body.1.Linear.forward.0", "Module.body.Sequential.forward.0", "Functional.mse_loss.0.forward",
]  # fmt: skip
BACKWARD = {
    "Functional.mse_loss.0.backward", "Functional.linear.2.backward", "Module.body.1.Linear.backward.0", "Functional.relu.1.backward",
    "Module.body.0.ReLU.backward.0", "Module.body.Sequential.backward.0", "Tensor.__add__.1.backward", "Tensor.__matmul__.0.backward",
    "Tensor.__add__.0.backward", "Tensor.__mul__.0.backward", "Functional.relu.0.backward", "Functional.linear.1.backward",
    "Module.linear2.Linear.backward.0", "Functional.linear.0.backward", "Module.linear1.Linear.backward.0",
}  # fmt: skip
GRADIENTS = {f"Module.{name}.Linear.parameters_grad.0" for name in ("linear1", "linear2", "body.1")}


def run(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], Path]:
    """dump.json of step 1, and its directory; the digests of the training are compared."""
    path = tmp_path / "dump"
    done = ms_programs.run(PROGRAM, path, *arguments, cwd=tmp_path, check=True)
    plain, probed = done.stdout.split()
    assert plain == probed
    (directory,) = (path / "step1").iterdir()
    return json.loads((directory / "dump.json").read_text()), directory


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Level mix, with tensors. The training has the same bits as without the probe."""
    return run(tmp_path_factory.mktemp("adapter"), "mix", "tensor")


@pytest.mark.slow
def test_records_have_the_names_of_torch(mix: tuple[dict[str, Any], Path]) -> None:
    """Modules, functions and methods are named as in dumps of PyTorch; what they call of MindSpore has no records; the framework is
    `mindtorch`."""
    document, _ = mix
    assert document["framework"] == "mindtorch"
    names = list(document["data"])
    assert [name for name in names if ".forward" in name] == FORWARD
    assert set(names) == {*FORWARD, *BACKWARD, *GRADIENTS}


def test_tensors_are_those_of_mindspore(mix: tuple[dict[str, Any], Path]) -> None:
    """Type and dtype are MindSpore's, files are numpy's, and their statistics are those of the record."""
    document, directory = mix
    record = document["data"]["Module.linear1.Linear.forward.0"]
    tensor = record["output"][0] if isinstance(record["output"], list) else record["output"]
    assert (tensor["type"], tensor["dtype"], tensor["shape"]) == ("mindspore.Tensor", "Float32", [3, 4])
    assert "requires_grad" not in tensor
    saved = np.load(directory / "dump_tensor_data" / tensor["data_name"])
    assert saved.max() == pytest.approx(tensor["Max"])
    assert {"weight", "bias"} <= set(record["parameters"])
    assert np.load(directory / "dump_tensor_data" / "Module.linear1.Linear.parameters_grad.0.weight.npy").shape == (4, 8)


def test_keywords_and_the_tree_are_there(mix: tuple[dict[str, Any], Path]) -> None:
    """Calls inside of a module have it as their parent, forward and backward; the file is read as any other dump."""
    _, directory = mix
    tree = json.loads((directory / "construct.json").read_text())
    assert tree["Functional.relu.1.forward"] == "Module.body.0.ReLU.forward.0"
    assert tree["Module.body.0.ReLU.backward.0"] == "Module.body.Sequential.backward.0"
    assert load_rank_directory(directory).framework == "mindtorch"


@pytest.mark.slow
def test_modules_alone_and_chosen_ones(tmp_path: Path) -> None:
    """Level L0 with a list: the chosen modules, and nothing of the functions. They have numbers: tensors are where their memory is, not
    where MSAdapter's ``Tensor.device`` says all of them are."""
    document, _ = run(tmp_path, "L0", "statistics", "body")
    assert set(document["data"]) == {name for name in (*FORWARD, *BACKWARD, *GRADIENTS) if name.startswith("Module.body")}
    assert isinstance(document["data"]["Module.body.Sequential.forward.0"]["output"][0]["Max"], float)


def test_the_monitor_watches_modules_and_optimizers_of_torch(tmp_path: Path) -> None:
    """Gradients are those that the parameters have when `step` is called, states and updates those of the optimizer; `TrainerMon` has the
    steps of the optimizer; the weights have the same bits with each of them as without."""
    done = ms_programs.run(PROGRAM, cwd=tmp_path, check=True)
    *digests, seen, squares = done.stdout.splitlines()
    assert len(digests) == 3
    assert len(set(digests)) == 1
    found = json.loads(seen)
    parameters = [f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    assert {key.split("/")[0] for key in found if key.split("/")[1] in parameters} == {
        *("grad_unreduced", "grad_reduced", "param_origin", "param_updated", "update", "ratio", "exp_avg", "exp_avg_sq"),
    }
    for name, square in json.loads(squares).items():
        assert found[f"grad_reduced/{name}/reduced"] == pytest.approx(square, rel=1e-12)
        assert found[f"grad_unreduced/{name}/accumulated"] == pytest.approx(square, rel=1e-12)
    assert {"actv/0.input/", "actv/2.output/", "actv_grad/0.output/", "actv_grad/2.input/"} <= set(found)
    tables = sorted(path.name for path in (tmp_path / "trainer_mon").rglob("*.csv"))
    assert any(name.startswith("grad_reduced") for name in tables), tables
