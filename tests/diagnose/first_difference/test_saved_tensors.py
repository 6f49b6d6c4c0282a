"""Distances from saved tensors: what statistics cannot see."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import Matcher
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.measure import distances
from msprobe_engine.measure.saved_tensors import refine


def leaf(tensor: torch.Tensor, name: str, folder: Path) -> dict[str, object]:
    torch.save(tensor, folder / f"{name}.pt")
    numbers = {"Max": tensor.max().item(), "Min": tensor.min().item(), "Mean": tensor.mean().item(), "Norm": tensor.norm().item()}
    shown = {"type": "torch.Tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape), "requires_grad": False}
    return {**shown, **numbers, "data_name": f"{name}.pt"}


def dumped(root: Path, order: list[int]) -> DumpTable:
    """A product whose weight has its rows in this order, and a call after it."""
    folder = root / "dump_tensor_data"
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    x = torch.randint(-8, 8, (4, 6)).float()
    weight = torch.randint(-8, 8, (6, 6)).float()[order]
    y = x @ weight.T
    z = y.relu()
    data = {}
    for name, inputs, output in (("Functional.linear.0.forward", [x, weight], y), ("Torch.relu.0.forward", [y], z)):
        leaves = [leaf(tensor, f"{name}.input.{i}", folder) for i, tensor in enumerate(inputs)]
        data[name] = {"input_args": leaves, "input_kwargs": {}, "output": [leaf(output, f"{name}.output.0", folder)]}
    (root / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L1", "framework": "pytorch", "data": data}))
    return read_side(root / "dump.json")


@pytest.fixture
def sides(tmp_path: Path) -> tuple[DumpTable, DumpTable]:
    return dumped(tmp_path / "target", [3, 4, 5, 0, 1, 2]), dumped(tmp_path / "golden", [0, 1, 2, 3, 4, 5])


def walker(target: DumpTable, golden: DumpTable) -> DifferenceWalk:
    a, b = Tree(target), Tree(golden)
    return DifferenceWalk(a, b, Matcher(a, b).run())


def test_swapped_rows_of_a_weight_are_found_where_they_enter(sides: tuple[DumpTable, DumpTable]) -> None:
    """Maximum, minimum, mean and norm of a permuted weight and of its product are the same; the elements say which record got it."""
    target, golden = sides
    found = walker(target, golden)
    assert refine(found.measured, target, golden, found.rows) == len(found.rows)
    first = found.walk().origins[0]
    assert target.ops[first.op] == "Functional.linear.0.forward"
    assert first.distance > 0.1


def test_statistics_alone_see_nothing(sides: tuple[DumpTable, DumpTable]) -> None:
    """The premise of the test above: by their statistics the two dumps are the same."""
    target, golden = sides
    rows = [(i, i) for i in range(len(target))]
    assert not distances.distances(target, golden, rows).distance.any()


def test_tensors_that_cannot_be_read_keep_their_distance(sides: tuple[DumpTable, DumpTable]) -> None:
    """Missing and damaged files, and files of another shape, change nothing."""
    target, golden = sides
    folder = target.path.parent / "dump_tensor_data"
    names = [target.data_name[row] for row in range(3)]
    (folder / names[0]).unlink()
    (folder / names[1]).write_bytes(b"PK")
    torch.save(torch.ones(3), folder / names[2])
    rows = [(i, i) for i in range(3)]
    found = distances.distances(target, golden, rows)
    before = found.distance.copy()
    assert refine(found, target, golden, rows) == 0
    np.testing.assert_array_equal(found.distance, before)


def test_nan_is_told_from_difference(sides: tuple[DumpTable, DumpTable]) -> None:
    """NaN on one side only is an infinite distance; at places of both sides it is none."""
    target, golden = sides
    name = target.data_name[0]
    good = torch.load(golden.path.parent / "dump_tensor_data" / name)
    bad = good.clone()
    bad[0, 0] = float("nan")
    found = distances.distances(target, golden, [(0, 0)])
    torch.save(bad, target.path.parent / "dump_tensor_data" / name)
    refine(found, target, golden, [(0, 0)])
    assert found.distance[0] == np.inf
    assert found.bad_target[0]
    assert not found.bad_golden[0]
    torch.save(bad, golden.path.parent / "dump_tensor_data" / name)
    refine(found, target, golden, [(0, 0)])
    assert found.distance[0] == 0


@pytest.mark.parametrize("number", ["Max", "Min", "Mean", "Norm"])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("factor", "contradicts"), [(1.5, True), (1 + 1e-5, False)])
def test_statistics_that_are_not_those_of_the_tensor_are_said(
    number: str, side: int, factor: float, contradicts: bool, sides: tuple[DumpTable, DumpTable]
) -> None:
    """The tensors count, of both runs; digits that a sum in another order changes are none."""
    file = sides[side].path
    document = json.loads(file.read_text())
    leaf_of_weight = document["data"]["Functional.linear.0.forward"]["input_args"][0]
    assert abs(leaf_of_weight[number]) > 0.1
    leaf_of_weight[number] *= factor
    file.write_text(json.dumps(document))
    target, golden = (read_side(one.path) for one in sides)
    refine(walker(target, golden).measured, target, golden, walker(target, golden).rows)
    said = [problem for problem in target.problems if "contradict the saved tensors" in problem]
    assert len(said) == contradicts
    assert all("statistics of 1 rows" in one and "Functional.linear.0.forward.input.0" in one for one in said)
