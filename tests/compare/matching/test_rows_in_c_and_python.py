"""Rows made by the compiled module are those that the Python code makes."""

from __future__ import annotations

import importlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.formats.dump import record_rows
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.record_rows import RowReader

number = st.floats(allow_nan=True, allow_infinity=True)
odd = st.one_of(st.none(), st.integers(-3, 10**20), st.sampled_from(["NaN", "x", True]), st.just([]), st.just({}))
shape = st.one_of(st.lists(st.integers(0, 5), max_size=3), st.just([[1], 2]), st.just("[2, 3]"), st.just([True, -1]), odd)
tensor = st.fixed_dictionaries(
    {
        "type": st.just("torch.Tensor"),
        "dtype": st.sampled_from(["torch.float32", "torch.int64", ""]),
        "shape": shape,
        "Max": st.one_of(number, number, odd),
        "Min": number,
        "Mean": st.one_of(number, number, odd),
        "Norm": number,
        "requires_grad": st.one_of(st.booleans(), st.none()),
    },
    optional={
        "md5": st.just("0badcafe"),
        "data_name": st.sampled_from(["a.b.pt", "-1"]),
        "digest": st.just("ff"),
        "nan_count": st.integers(0, 3),
    },
)
argument = st.fixed_dictionaries({"type": st.sampled_from(["int", "str", "torch.Size", "slice"]), "value": odd})
node: Any = st.recursive(
    st.one_of(tensor, tensor, argument, odd),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=6,
)
sections = st.lists(st.one_of(tensor, tensor, node), max_size=40)
record = st.one_of(
    st.dictionaries(
        st.sampled_from(["input_args", "input_kwargs", "input", "parameters", "output", "tags", "is_recompute"]),
        st.one_of(sections, node),
        max_size=5,
    ),
    odd,
)
names = st.sampled_from(
    [
        "Module.a.A.forward.0",
        "Torch.add.0.forward",
        "Torch.add.1.backward",
        "x.debug",
        "Module.a.A.parameters_grad",
        "Distributed.all_reduce.0.forward",
        "é.ü",
    ]
)


def columns(reader: RowReader, side: DumpTable) -> str:
    """All that was read, as one text; NaN equals NaN there."""
    return repr([(field.name, getattr(side, field.name)) for field in fields(side)] + [reader.left_out, reader.first_left_out])


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if record_rows._load_native() is None:
        pytest.skip("the compiled module was not built here")


@given(st.lists(st.dictionaries(names, record, max_size=5), max_size=3))
def test_the_same_rows(blocks: list[dict[str, Any]]) -> None:
    """Tensors, arguments, nested and damaged nodes, gradients, single saves and collectives: every column is the same, in order."""
    plain, fast = DumpTable(Path("a")), DumpTable(Path("a"))
    slowly, quickly = RowReader(plain), RowReader(fast)
    for block in blocks:
        for name, one in block.items():
            slowly.record(name, one)
        quickly.block(block)
    assert columns(quickly, fast) == columns(slowly, plain)


@pytest.mark.parametrize("wrong", [[], ({}, None, DumpTable(Path("a")), {}, 1), ({}, None, None, {}), ([], None, DumpTable(Path("a")), {})])
def test_wrong_arguments(wrong: Any) -> None:
    """What is no block of records and no side is an error, not a crash."""
    rows = importlib.import_module("msprobe_engine.native._siderows")
    with pytest.raises((TypeError, AttributeError)):
        rows.block(*wrong)


def test_an_error_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of the part in Python comes through."""
    side = DumpTable(Path("a"))
    reader = RowReader(side)

    def broken(*_: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(reader, "item", broken)
    with pytest.raises(KeyError, match="broken"):
        reader.block({"Torch.add.0.forward": {"input_args": [{"type": "int", "value": 1}]}})


def test_without_the_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A dump is read to the same columns where no compiler was."""
    values = {"Max": 1.5, "Min": -2.0, "Mean": 0.25, "Norm": 3.0}
    one = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3], **values, "requires_grad": True}
    data = {
        f"Torch.add.{n}.forward": {"input_args": [one, {"type": "int", "value": n}], "input_kwargs": {}, "output": [one] * 40}
        for n in range(5)
    }
    (tmp_path / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L1", "data": data}, indent=1))
    fast = read_side(tmp_path / "dump.json")
    monkeypatch.setattr(record_rows, "_load_native", lambda: None)
    slow = read_side(tmp_path / "dump.json")
    assert len(fast) == 5 * 42
    assert columns(RowReader(fast), fast) == columns(RowReader(slow), slow)
