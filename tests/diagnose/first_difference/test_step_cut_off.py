"""A step that was cut off, at any record, is held against the whole one as far as it goes: no command names a culprit, each ends with 3,
and what was done wrong before the cut is still found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main

COMMANDS = {
    "compare": "compare -tp {target} -gp {golden} -o {out} --workers 1",
    "diagnose": "diagnose {target} {golden} -o {out}",
    "graph": "graph {target} {golden} -o {out} --format html --workers 1",
}
BEHIND = "lie behind the place where it was cut off"


@pytest.fixture
def sides(small_dump: Path, tmp_path: Path) -> dict[str, Path]:
    found = {"whole": tmp_path / "whole", "cut": tmp_path / "cut"}
    for place in found.values():
        shutil.copytree(small_dump / "step0", place / "step0")
    return found


def cut(root: Path, records: int, off: str = "") -> None:
    """Leave the first records of a dump, as a run leaves them that ends there; the output of `off` is half as large again."""
    file = root / "step0/rank0/dump.json"
    document = json.loads(file.read_text())
    kept = list(document["data"])[:records]
    document |= {"complete": False, "data": {name: document["data"][name] for name in kept}}
    for tensor in _tensors(document["data"].get(off, {}).get("output")):
        tensor |= {key: 1.5 * tensor[key] for key in ("Max", "Min", "Mean", "Norm")}
    file.write_text(json.dumps(document))


def _tensors(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict) and "Max" in node:
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _tensors(child)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("cut_side", ["target", "golden"])
@pytest.mark.fast_cells("golden-compare", "golden-diagnose", "golden-graph", "target-diagnose", "target-graph")
def test_no_culprit(command: str, cut_side: str, sides: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On either side, in the forward pass, in the backward pass and in the update."""
    file = sides["whole"] / "step0/rank0/dump.json"
    total = len(json.loads(file.read_text())["data"])
    paths = {"target": sides["whole"], "golden": sides["whole"], cut_side: sides["cut"]}
    for part in (1, 3, 5, 7, 9):
        shutil.copy(file, sides["cut"] / "step0/rank0/dump.json")
        cut(sides["cut"], total * part // 10)
        code = main([word.format(**paths, out=tmp_path / f"out{part}") for word in COMMANDS[command].split()])
        said = capsys.readouterr()
        assert code == 3, (part, said.out)
        assert BEHIND in said.out + said.err, (part, said.out)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_fault_before_the_cut(command: str, sides: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is found and named."""
    data = json.loads((sides["cut"] / "step0/rank0/dump.json").read_text())["data"]
    name = next(name for name in data if name.startswith("Functional.layer_norm.0."))
    cut(sides["cut"], len(data) // 2, off=name)
    code = main([word.format(target=sides["cut"], golden=sides["whole"], out=tmp_path / "out") for word in COMMANDS[command].split()])
    assert code == 1
    assert name in "\n".join(capsys.readouterr().out.split("\n")[:3])
