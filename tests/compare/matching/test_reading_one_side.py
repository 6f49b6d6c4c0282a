"""Reading one side: rows of dumps of both versions of the existing tool, in blocks or in one piece; damaged files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.stream import open_records

FIXTURES = Path(__file__).parents[2] / "fixtures"


def dump_of(version: str, name: str) -> Path:
    return next((FIXTURES / version / name / "step0").glob("*/d*.json"))


@pytest.mark.parametrize("version", ["8.1.1", "26.2.0"])
@pytest.mark.parametrize("name", ["L0", "L1", "mix", "tensor", "debug"])
@pytest.mark.parametrize("block", [64, 700, 1 << 23])
def test_blocks(version: str, name: str, block: int) -> None:
    """Whatever the size of a block: the records are those of the whole file, in its order."""
    path = dump_of(version, name)
    with open_records(path, block) as records:
        seen = [item for part in records for item in part.items()]
    document = json.loads(path.read_text())
    assert seen == list(document.pop("data").items())
    assert records.header == document


@pytest.mark.parametrize("version", ["8.1.1", "26.2.0"])
def test_rows(version: str) -> None:
    """Row names, roles and values as the tables of the existing tool show them."""
    side = read_side(dump_of(version, "mix"))
    rows = {side.name[i]: i for i in range(len(side))}
    i = rows["Functional.embedding.0.forward.input.4"]
    assert (side.dtype[i], side.shape[i], side.stats_of(i)) == ("<class 'float'>", [], (2.0, 2.0, 2.0, 2.0))
    i = rows["Functional.embedding.0.forward.input.2"]
    assert (side.dtype[i], side.shape[i], side.stats_of(i)) == (None, None, (None,) * 4)
    i = rows["Functional.linear.0.forward.input.1"]
    assert (side.dtype[i], side.shape[i], side.role[i], side.requires_grad[i]) == ("torch.float32", [16, 8], INPUT, True)
    assert side.stats[i].tolist() == list(side.stats_of(i))
    weight = next(name for name in rows if name.startswith("Module.head.Linear.parameters_grad") and name.endswith("weight"))
    assert side.role[rows[weight]] == PARAMETERS_GRAD
    assert weight.count("parameters_grad") == 1
    module = [side.role[row] for row in side.rows(side.ops.index("Module.head.Linear.forward.0"))]
    assert module == sorted(module, key=(INPUT, PARAMETERS, OUTPUT).index)
    assert side.stacks["Functional.linear.0.forward"]
    assert side.parent("Functional.linear.0.forward") == "Module.blocks.0.fc1.Linear.forward.0"


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("block", [500, 1 << 23])
def test_cut_off(tmp_path: Path, cut: float, block: int) -> None:
    """A file that ends too early is an error that says so, wherever it ends."""
    data = dump_of("26.2.0", "mix").read_bytes()
    path = tmp_path / "dump.json"
    path.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(DumpFormatError, match=r"dump.json.*(cut off|damaged)"), open_records(path, block) as records:
        list(records)


def test_foreign_text(tmp_path: Path) -> None:
    """A file with another indentation is read too; one that holds no dump is named."""
    document = json.loads(dump_of("26.2.0", "L1").read_text())
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(document))
    assert read_side(path).ops == list(document["data"])
    path.write_text("[]")
    with pytest.raises(DumpFormatError, match="a JSON object is needed"):
        read_side(path)
    with pytest.raises(DumpFormatError, match="is not there"):
        read_side(tmp_path / "other" / "dump.json")
