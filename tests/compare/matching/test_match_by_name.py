"""Rows matched by name as the existing tool matches them, fuzzily, and through every kind of mapping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.align.calls.match import FUZZY_MESSAGE, Keys, joined_fuzzily, match, without_call
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.mapping_file import write_mapping
from msprobe_engine.measure.options import NEW, OLD, CompareOptions

FIXTURES = Path(__file__).parents[2] / "fixtures"
MIX = next((FIXTURES / "8.1.1/mix").glob("step0/*/dump.json"))
NAMES = st.lists(st.sampled_from([f"F.{a}.{n}.forward.input.0" for a in "ab" for n in range(2)]), max_size=9)


def edited(directory: Path, *changes: tuple[str, str]) -> DumpTable:
    """A copy of a real dump with texts of its three files replaced."""
    directory.mkdir()
    for name in ("dump.json", "stack.json", "construct.json"):
        text = (MIX.parent / name).read_text()
        for old, new in changes:
            text = text.replace(old, new)
        (directory / name).write_text(text)
    return read_side(directory / "dump.json")


def mindspore(directory: Path, *changes: tuple[str, str]) -> DumpTable:
    return edited(
        directory,
        ("Module.", "Cell."), ("Functional.linear", "Functional.dense"), ("Torch.relu", "Mint.relu"), ("torch.float32", "Float32"),
        ("torch.int64", "Int64"), ('"framework": "pytorch"', '"framework": "mindspore"'), *changes,
    )  # fmt: skip


def matched(a: DumpTable, b: DumpTable, **options: Any) -> int:
    found = match(a, b, CompareOptions(**options))
    return int(((found.target >= 0) & (found.golden >= 0)).sum())


@pytest.mark.parametrize("columns", [OLD, NEW])
def test_shape_and_dtype(tmp_path: Path, columns: str) -> None:
    """8.1.1 joins by name and shape, 26.2.0 by name; float64 against float32 is no match in 8.1.1, an integer against a float in none."""
    b = read_side(MIX)
    document = json.loads(MIX.read_text())
    items = next(v for k, v in document["data"].items() if k.startswith("Functional.linear"))["input_args"]
    items[0]["shape"] = [*items[0]["shape"], 1]
    items[1]["dtype"] = "torch.float64"
    items[2]["dtype"] = "torch.int64"
    (tmp_path / "dump.json").write_text(json.dumps(document))
    a = read_side(tmp_path / "dump.json")
    lost = [a.name[i] for i, j in zip(*_columns(a, b, columns)) if j < 0]
    assert len(lost) == (3 if columns == OLD else 1)


def _columns(a: DumpTable, b: DumpTable, columns: str) -> tuple[list[int], list[int]]:
    found = match(a, b, CompareOptions(columns=columns, compat=True))
    assert found.target.tolist() == list(range(len(a)))
    return found.target.tolist(), found.golden.tolist()


def test_backward_counted_anew(tmp_path: Path) -> None:
    """26.2.0 counts backward calls in the order they come, 8.1.1 takes their names."""
    changes = [(f"Functional.linear.{n}.backward", f"Functional.linear.{n + 7}.backward") for n in range(5)]
    a, b = edited(tmp_path / "a", *changes), read_side(MIX)
    assert matched(a, b, compat=True, columns=NEW) == len(a)
    assert matched(a, b, compat=True, columns=OLD) < len(a)


def slow(a: list[str], b: list[str]) -> list[tuple[int, int]]:
    """Two queues, looked through one by one."""
    first: list[int] = []
    second: list[int] = []
    found: list[tuple[int, int]] = []
    for at in range(max(len(a), len(b))):
        first += [at] if at < len(a) else []
        second += [at] if at < len(b) else []
        if bool(first) != bool(second):
            break
        pairs = [(len(first) - 1, n) for n in range(len(second))] + [(n, len(second) - 1) for n in range(len(first) - 1)]
        hit = next(((x, y) for x, y in pairs if a[first[x]] == b[second[y]]), None)
        if hit:
            found += [(i, -1) for i in first[: hit[0]]] + [(first[hit[0]], second[hit[1]])]
            del first[: hit[0] + 1], second[: hit[1] + 1]
    return found + [(i, -1) for i in first]


@given(NAMES, NAMES)
def test_fuzzy(first: list[str], second: list[str]) -> None:
    """The linear pass finds what looking through both queues finds; without compat no row of the target is lost."""
    keys = Keys(first, second, range(len(first)), range(len(second)))
    pairs = joined_fuzzily(keys, [""] * len(first), [""] * len(second), shaped=False, compat=True)
    assert list(zip(pairs.target, pairs.golden)) == slow([without_call(n) for n in first], [without_call(n) for n in second])
    whole = joined_fuzzily(keys, [""] * len(first), [""] * len(second), shaped=False, compat=False)
    assert whole.target == list(range(len(first)))


def test_fuzzy_in_statistics_mode(tmp_path: Path) -> None:
    """Fuzzy matching works without saved tensors too, and every pair says that it is fuzzy."""
    b = read_side(MIX)
    a = edited(tmp_path / "a", ("Functional.linear.3.", "Functional.linear.30."))
    found = match(a, b, CompareOptions(fuzzy=True, match="name"))
    assert (found.golden >= 0).all()
    assert set(found.messages.values()) == {FUZZY_MESSAGE}
    with pytest.raises(UsageError, match="exclude"):
        match(a, b, CompareOptions(fuzzy=True, data_mapping={"a": "b"}))


@pytest.mark.parametrize("how", ["structure", "name"])
def test_data_mapping(tmp_path: Path, how: str) -> None:
    """A row goes where the mapping says, whatever shape and dtype are there; a file read back is the mapping that was saved."""
    b = read_side(MIX)
    a = edited(tmp_path / "a")
    mapping = {a.name[5]: b.name[90], a.name[6]: "nowhere"}
    file = tmp_path / "data_mapping.yaml"
    write_mapping(file, mapping)
    assert yaml.safe_load(file.read_text()) == mapping
    for source in (mapping, str(file)):
        found = match(a, b, CompareOptions(match=how, data_mapping=source))
        partner = dict(zip(found.target.tolist(), found.golden.tolist()))
        assert (partner[5], partner[6]) == (90, -1)


def test_mindspore(tmp_path: Path) -> None:
    """By structure a dump of another framework is matched as it is; by name each mapping adds its part, as in the existing tool."""
    a, b = mindspore(tmp_path / "a"), read_side(MIX)
    assert matched(a, b) == len(a)
    plain, api, cell = (matched(a, b, compat=True, **more) for more in ({}, {"api_mapping": True}, {"cell_mapping": True}))
    assert plain < api < len(a)
    assert plain < cell < len(a)


ENTRY = {"ms_api": "Functional.dense", "pt_api": "Functional.linear", "ms_args": [0, 1], "pt_args": [1, 0]}


@pytest.mark.parametrize("content", [[{**ENTRY, "ms_output": [0], "pt_output": [0]}], {**ENTRY, "ms_outputs": [0], "pt_outputs": [0]}])
def test_api_mapping(tmp_path: Path, content: Any) -> None:
    """The list of entries and the documented form of one entry both work; positions go where they say, the others match nothing."""
    (tmp_path / "am.yaml").write_text(yaml.safe_dump(content))
    a, b = mindspore(tmp_path / "a"), read_side(MIX)
    found = match(a, b, CompareOptions(columns=NEW, match="name", api_mapping=tmp_path / "am.yaml", data_mapping=None))
    pairs = {a.name[i]: b.name[j] if j >= 0 else "" for i, j in zip(found.target, found.golden) if i >= 0}
    assert pairs["Functional.dense.0.forward.input.0"] == "Functional.linear.0.forward.input.1"
    assert pairs["Functional.dense.0.forward.input.2"] == ""
    assert pairs["Functional.dense.0.forward.output.0"] == "Functional.linear.0.forward.output.0"
    with pytest.raises(UsageError, match="as many"):
        match(a, b, CompareOptions(api_mapping=[{**ENTRY, "pt_args": [0]}]))


def test_cell_mapping(tmp_path: Path) -> None:
    """Whole names of modules are replaced; 26.2.0 also replaces parts. It works for PyTorch too."""
    a, b = edited(tmp_path / "a", ("fc2", "dense2")), read_side(MIX)
    whole = {f"blocks.{n}.dense2.Linear": f"blocks.{n}.fc2.Linear" for n in range(9)}
    assert matched(a, b, compat=True, columns=OLD, cell_mapping=whole) == len(a)
    assert matched(a, b, compat=True, columns=OLD, cell_mapping={"dense2": "fc2"}) < len(a)
    assert matched(a, b, compat=True, columns=NEW, cell_mapping={"dense2": "fc2"}) == len(a)


def test_layer_mapping(tmp_path: Path) -> None:
    """Names of children are replaced class by class, with both layouts of stack.json, for PyTorch as well."""
    a, b = edited(tmp_path / "a", ("fc2", "dense2"), ("blocks", "layers")), read_side(MIX)
    same = {"layer_mapping": True}
    few, many = matched(a, b, **same), matched(a, b, layer_mapping={"TopLayer": {"layers": "blocks"}, "Block": {"dense2": "fc2"}})
    assert few < many
    assert many == matched(read_side(MIX), b, **same)
    found = match(a, b, CompareOptions(layer_mapping=True))
    assert found.rows is not None
    assert set(found.rows) == set(a.name)


@pytest.mark.parametrize("content", ["[", "just text", "a: [1]", "a: 1\na: 2"])
def test_bad_file(tmp_path: Path, content: str) -> None:
    """A mapping that is none is refused, with the file and the reason."""
    file = tmp_path / "m.yaml"
    file.write_text(content)
    side = read_side(MIX)
    with pytest.raises(UsageError, match="mapping"):
        match(side, side, CompareOptions(data_mapping=str(file)))
