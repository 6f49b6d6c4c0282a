"""Facts of our dump directories that a script written for the existing tool may rely on."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import FACTS as CELLS
from cells import RUN, SUITE, Cell
from matching import RankDump, is_tensor, load
from suite import STEPS, rank_directories

pytestmark = pytest.mark.framework


@pytest.fixture(scope="module")
def out() -> Path:
    """Our dumps of these cells, made once for all tests of ours."""
    return SUITE.ours(RUN)


def directories(out: Path, cell: Cell) -> list[Path]:
    """All rank directories of a cell."""
    return [path for step in range(STEPS) for path in rank_directories(out, cell, step)]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_layout(out: Path, cell: Cell) -> None:
    """step{N}/rank{R}, or proc{pid} of one process without a group; the files that task, level and extra_info ask for; nothing else."""
    root = out / str(cell) / "dump"
    assert sorted(p.name for p in root.iterdir()) == ["step0", "step1"]
    expected = {"debug.json"} if cell.level == "debug" else {"dump.json", "stack.json", "construct.json"}
    if cell.variant == "no_extra":
        expected = {"dump.json"}
    if cell.task == "tensor" or cell.variant == "tensor_list":
        expected |= {"dump_tensor_data"}
    if cell.task == "structure":
        expected |= {"shapes.json"}
    for path in directories(out, cell):
        assert re.fullmatch(r"rank[01]" if cell.ranks == 2 else r"proc\d+", path.name)
        begins = path.parent.name == "step0" and path.name != "rank1"  # there is what the run was started with
        assert {p.name for p in path.iterdir()} == expected | ({"config_check_pack.zip"} if begins else set())


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_modes(out: Path, cell: Cell) -> None:
    """Files 0640, directories 0750, less what the umask takes; no links but second names of a saved tensor."""
    mask = os.umask(0)
    os.umask(mask)
    for path in [p for top in directories(out, cell) for p in (top, top.parent, *top.rglob("*"))]:
        mode = path.lstat().st_mode
        assert stat.S_IMODE(mode) == (0o750 if path.is_dir() else 0o640) & ~mask, path
        assert stat.S_ISDIR(mode) or stat.S_ISREG(mode)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_json_text(out: Path, cell: Cell) -> None:
    """Every file of the format is what json.dumps(..., indent=1) writes of what plain json reads."""
    for path in [p for top in directories(out, cell) for p in top.glob("*.json") if p.name != "shapes.json"]:
        text = path.read_text(encoding="ascii")
        assert json.dumps(json.loads(text), indent=1) == text, path


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_stacks_and_construct(out: Path, cell: Cell) -> None:
    """stack.json groups forward records under running numbers; construct.json maps every record to a node of its own or null."""
    for dump in map(load, directories(out, cell)):
        if not dump.stacks:
            assert cell.level == "debug" or cell.variant == "no_extra"
            continue
        assert all(".forward" in name for name in dump.stacks)
        assert all(re.match(r"File .+, line \d+, in .+, \n ", line) for lines in dump.stacks.values() for line in lines)
        assert dump.directory is not None
        assert list(json.loads((dump.directory / "stack.json").read_text())) == [
            str(i) for i in range(len({*map(tuple, dump.stacks.values())}))
        ]
        assert set(dump.construct.values()) - {None} <= set(dump.construct)
        assert (dump.construct == {}) == (cell.level == "L1")
        names = {n for n in dump.data if ".parameters_grad." not in n}
        if cell.level != "L1" and cell.task != "structure":
            assert names <= set(dump.construct)


@pytest.mark.parametrize("cell", [c for c in CELLS if c.task == "tensor" or c.variant == "tensor_list"], ids=str)
@pytest.mark.fast_cells("statistics-mix-statistics-1-tensor_list", "tensor-debug-statistics-1")
def test_tensor_files(out: Path, cell: Cell) -> None:
    """Every data_name has its file and every file its data_name, made of the record's name and the place of the tensor; the file is a
    plain tensor of the recorded dtype and shape, readable with weights_only; dump_data_dir is the directory, as configured."""
    for dump in map(load, directories(out, cell)):
        assert dump.directory is not None
        named = dict(tensors(dump))
        assert sorted(t["data_name"] for t in named.values() if "data_name" in t) == dump.tensors
        for name, tensor in named.items():
            if "data_name" not in tensor:
                assert cell.variant == "tensor_list" or tensor["Max"] is None
                continue
            assert tensor["data_name"] == f"{name}.pt"
            saved = torch.load(dump.directory / "dump_tensor_data" / f"{name}.pt", weights_only=True)
            assert type(saved) is torch.Tensor
            assert (str(saved.dtype), list(saved.shape)) == (tensor["dtype"], tensor["shape"])
            assert saved.is_contiguous()
        raw = json.loads((dump.directory / ("debug.json" if cell.level == "debug" else "dump.json")).read_text())
        assert os.path.normpath(out / str(cell) / raw["dump_data_dir"]) == str(dump.directory / "dump_tensor_data")


WORDS = {"input_args": "input", "input_kwargs": "kwargs", "input": "input", "output": "output", "parameters": "parameters"}


def tensors(dump: RankDump) -> list[tuple[str, Any]]:
    """File name without suffix, by the rules of the existing tool, and tensor object of every tensor."""
    found: list[tuple[str, Any]] = []

    def walk(name: str, node: Any) -> None:
        if is_tensor(node):
            found.append((name, node))
        elif isinstance(node, (list, dict)):
            for key, child in node.items() if isinstance(node, dict) else enumerate(node):
                walk(f"{name}.{key}", child)

    for record, sections in dump.data.items():
        if record.endswith(".debug"):
            walk(record, sections)
        elif ".parameters_grad" in record:
            for parameter, (tensor,) in sections.items():
                walk(f"{record}.{parameter}", tensor)
        else:
            for section, content in sections.items():
                if section in WORDS:
                    walk(f"{record}.{WORDS[section]}", content)
    return found
