"""Which parameter a call of the update is of, and what is done about calls of which one side alone knows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msprobe_engine.align.calls.alignment import align_trees
from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.parallel import parameter_owner
from msprobe_engine.formats.dump.read_table import read_side


def tensor(value: float, size: int = 4) -> dict[str, Any]:
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [size], "Max": value, "Min": -value, "Mean": 0.0, "Norm": value}


def call(inputs: list[Any], output: Any) -> dict[str, Any]:
    return {"input_args": inputs, "input_kwargs": {}, "output": [output]}


def model() -> dict[str, Any]:
    """Two weights, 1.0 and 2.0, with gradients of 10.0 and 20.0."""
    records: dict[str, Any] = {}
    for name, value in (("one", 1.0), ("two", 2.0)):
        module = call([tensor(3.0)], tensor(4.0)) | {"parameters": {"weight": tensor(value)}}
        records[f"Module.{name}.Linear.forward.0"] = module
    for name, value in (("two", 2.0), ("one", 1.0)):
        records[f"Module.{name}.Linear.backward.0"] = {"input": [tensor(5.0)], "output": [tensor(6.0)]}
        records[f"Module.{name}.Linear.parameters_grad.0"] = {"weight": [tensor(10 * value)]}
    return records


def tree(directory: Path, update: dict[str, Any]) -> Tree:
    directory.mkdir(parents=True)
    document = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None, "data": {**model(), **update}}
    (directory / "dump.json").write_text(json.dumps(document))
    (directory / "construct.json").write_text("{}")
    return Tree(read_side(directory / "dump.json"))


def test_a_list_of_several_parameters(tmp_path: Path) -> None:
    """A call that puts a list of tensors into a buffer, of which one is known, is of no parameter, and tells nothing of the others."""
    update = {
        "Functional.flatten_dense_tensors.0.forward": call([[tensor(10.0), tensor(7.0)]], tensor(12.0, 8)),
        "Tensor.amax.0.forward": call([tensor(7.0)], tensor(7.0, 1)),
        "Tensor.amax.1.forward": call([tensor(10.0)], tensor(10.0, 1)),
    }
    side = tree(tmp_path / "side", update)
    assert parameter_owner.owners(side) == {side.index["Tensor.amax.1.forward"]: ("one", "weight")}


def test_a_call_of_the_same_numbers_whose_parameter_one_side_knows(tmp_path: Path) -> None:
    """Calls that hold the same numbers stay together where one of two runs does not know of which parameter they are."""
    golden = {
        "Tensor.amax.0.forward": call([tensor(7.0)], tensor(7.0, 1)),
        "Tensor.mul_.0.forward": call([tensor(10.0)], tensor(10.5)),
        "Tensor.mul_.1.forward": call([tensor(20.0)], tensor(20.5)),
    }
    target = {
        "Tensor.narrow.0.forward": call([tensor(10.0)], tensor(7.0)),  # this run alone shows where it comes from
        "Tensor.amax.0.forward": golden["Tensor.amax.0.forward"],
        "Tensor.mul_.0.forward": golden["Tensor.mul_.1.forward"],
        "Tensor.mul_.1.forward": golden["Tensor.mul_.0.forward"],
        "Tensor.mul_.2.forward": call([tensor(30.0)], tensor(30.5)),
    }
    golden["Tensor.narrow.0.forward"] = call([tensor(8.0)], tensor(8.5))
    trees = tree(tmp_path / "target", target), tree(tmp_path / "golden", golden)
    known = [(parameter_owner.owners(side)).get(side.index["Tensor.amax.0.forward"]) for side in trees]
    assert known == [("one", "weight"), None]
    structure = parameter_owner.rematch_by_owner(align_trees(*trees).structure, *trees)
    pairs = {trees[0].names[i]: trees[1].names[j] for i, j in structure.pairs}
    assert pairs["Tensor.amax.0.forward"] == "Tensor.amax.0.forward"


def test_a_collective_between_calls_of_one_parameter(tmp_path: Path) -> None:
    """What ranks put together between two calls of one parameter is of all, while a moment that is still zero is of that one."""
    update = {
        "Tensor.norm.0.forward": call([tensor(10.0)], tensor(10.0, 1)),
        "Distributed.all_reduce.0.forward": call([tensor(0.0, 1)], tensor(0.0, 1)),
        "Tensor.lerp_.0.forward": call([tensor(0.0)], tensor(0.0)),
        "Tensor.mul_.0.forward": call([tensor(10.0)], tensor(10.5)),
    }
    trees = [tree(tmp_path / name, update) for name in ("target", "golden")]
    between = parameter_owner.with_calls_between(parameter_owner.owners(trees[0]), trees[0])
    assert {trees[0].names[op] for op in between} == {"Tensor.norm.0.forward", "Tensor.lerp_.0.forward", "Tensor.mul_.0.forward"}
