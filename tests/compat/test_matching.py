"""The comparator sees what it says it sees."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matching import RankDump, differences, is_tensor, moved, neutral, same_statistic

TENSOR: dict[str, Any] = {
    "type": "torch.Tensor",
    "dtype": "torch.float32",
    "shape": [2, 2],
    "Max": 1.0,
    "Min": -1.0,
    "Mean": 0.25,
    "Norm": 1.5,
    "requires_grad": True,
    "md5": "0a1b2c3d",
    "data_name": "Torch.abs.0.forward.input.0.pt",
}


def dump() -> RankDump:
    """Two records with everything that a dump has."""
    first = {
        "input_args": [copy.deepcopy(TENSOR), None],
        "input_kwargs": {"dim": {"type": "int", "value": 1}},
        "output": [copy.deepcopy(TENSOR)],
    }
    return RankDump(
        header={"task": "statistics", "dump_data_dir": None},
        data={"Torch.abs.0.forward": first, "Torch.sin.0.forward": copy.deepcopy(first)},
        stacks={"Torch.abs.0.forward": ["File a"], "Torch.sin.0.forward": ["File b"]},
        construct={"Torch.abs.0.forward": None, "Torch.sin.0.forward": "Module.a.A.forward.0"},
        files=["construct.json", "dump.json", "stack.json"],
        tensors=["Torch.abs.0.forward.input.0.pt"],  # every tensor here has this one name
    )


def _set(path: str, value: Any) -> Any:
    def change(side: RankDump) -> None:
        node: Any = vars(side)
        *inner, last = path.split("/")
        for part in inner:
            node = node[int(part) if part.isdigit() else part]
        if value is ...:
            del node[int(last) if last.isdigit() else last]
        else:
            node[int(last) if last.isdigit() else last] = value

    return change


FIRST = "data/Torch.abs.0.forward"
CHANGES = {
    "missing": _set(FIRST, ...),
    "extra": _set("data/Torch.cos.0.forward", {}),
    "key missing": _set(f"{FIRST}/input_kwargs/dim", ...),
    "key extra": _set(f"{FIRST}/input_kwargs/keepdim", {"type": "bool", "value": True}),
    "length": _set(f"{FIRST}/output", []),
    "null": _set(f"{FIRST}/input_args/0/Mean", None),
    "type": _set(f"{FIRST}/input_args/0/type", "torch.Other"),
    "dtype": _set(f"{FIRST}/input_args/0/dtype", "torch.float64"),
    "shape": _set(f"{FIRST}/input_args/0/shape", [4]),
    "flag": _set(f"{FIRST}/input_args/0/requires_grad", False),
    "value": _set(f"{FIRST}/input_args/0/Max", 1.0000001),
    "checksum": _set(f"{FIRST}/input_args/0/md5", "00000000"),
    "dangling": _set("tensors", ["Torch.abs.0.forward.input.0.pt", "x.pt"]),
    "header": _set("header/task", "tensor"),
    "stack missing": _set("stacks/Torch.abs.0.forward", ...),
    "stack extra": _set("stacks/Torch.cos.0.forward", []),
    "stack": _set("stacks/Torch.abs.0.forward", ["File c"]),
    "node missing": _set("construct/Torch.abs.0.forward", ...),
    "node extra": _set("construct/Torch.cos.0.forward", None),
    "parent": _set("construct/Torch.abs.0.forward", "clip_grad"),
    "layout": _set("files", ["dump.json"]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_found_under_its_kind(kind: str) -> None:
    """One change on our side gives differences of that kind and no other."""
    ours = dump()
    CHANGES[kind](ours)
    assert {d.kind for d in differences(ours, dump())} == {kind}


def test_another_file_name_is_found() -> None:
    """A tensor that names another file differs, also when that file is there."""
    ours = dump()
    _set(f"{FIRST}/input_args/0/data_name", "x.pt")(ours)
    ours.tensors.append("x.pt")
    assert [d.kind for d in differences(ours, dump())] == ["file"]


def test_a_number_that_is_left_out_there() -> None:
    """8.1.1 writes X.parameters_grad: it is compared with our last numbered one, and the name is said to differ."""
    ours, theirs = dump(), dump()
    for side, names in ((ours, ("M.a.parameters_grad.0", "M.a.parameters_grad.1")), (theirs, ("M.a.parameters_grad",))):
        for name in names:
            side.data[name] = {"weight": [{**TENSOR, "Max": 2.0 if name.endswith("1") else 1.0}]}
    kinds = {d.kind: d.record for d in differences(ours, theirs)}
    assert kinds == {"name": "M.a.parameters_grad.1", "extra": "M.a.parameters_grad.0", "value": "M.a.parameters_grad.1"}


def test_equal_dumps_have_no_difference() -> None:
    """Nothing is reported where nothing differs."""
    assert differences(dump(), dump()) == []


def test_order_names_the_record_that_moved() -> None:
    """Swapped records: one of them is named."""
    ours = dump()
    ours.data = dict(reversed(ours.data.items()))
    assert [d.kind for d in differences(ours, dump())] == ["order"]


@given(st.permutations(list("abcdefgh")))
def test_moved_leaves_a_common_order(names: list[str]) -> None:
    """Without the names that moved, both sides are in the same order; nothing moved in equal lists."""
    theirs = list("abcdefgh")
    out = moved(names, theirs)
    assert [n for n in names if n not in out] == [n for n in theirs if n not in out]
    assert (out == []) == (names == theirs)


def test_statistics_are_equal_up_to_rounding() -> None:
    """Max and Min are elements and equal to the bit; Mean and Norm may round; a mean of cancelling numbers may differ by a rounding
    of their size; NaN equals NaN."""
    near = {**TENSOR, "Norm": 1.5 * (1 + 1e-6), "Mean": 0.25 + 1e-7}
    assert same_statistic("Norm", near, TENSOR)
    assert same_statistic("Mean", near, TENSOR)
    assert not same_statistic("Norm", {**TENSOR, "Norm": 1.5001}, TENSOR)
    assert not same_statistic("Max", {**TENSOR, "Max": 1.0000001}, TENSOR)
    assert same_statistic("Mean", {**TENSOR, "Mean": 1e-8}, {**TENSOR, "Mean": -1e-8})
    nan = {**TENSOR, "Max": float("nan")}
    assert same_statistic("Max", nan, nan)
    assert not same_statistic("Max", nan, TENSOR)


def test_paths_of_the_machine_are_taken_out_of_stacks() -> None:
    """Site packages, the standard library and this directory look the same in every environment."""
    for before, after in (
        ("File /a/lib/python3.11/site-packages/torch/x.py, line 1", "File /env/torch/x.py, line 1"),
        ("File /usr/lib/python3.12/threading.py, line 2", "File /python/threading.py, line 2"),
        ("File /b/tests/compat/training.py, line 3", "File /job/training.py, line 3"),
    ):
        assert neutral(before) == after


def test_tensors_are_told_from_other_objects() -> None:
    """A tensor or array has a dtype and a shape; a dict argument may have other keys."""
    assert is_tensor(TENSOR)
    assert not is_tensor({"type": "int", "value": 1})
    assert not is_tensor(None)
