"""A number that differs is never nothing: of a real dump each recorded tensor in turn gets another number on one side, and every command
must end with 1 and name the record in its first lines."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main

COMMANDS = {
    "compare": "compare -tp {target} -gp {golden} -o {out} --workers 1",
    "diagnose": "diagnose {target} {golden} -o {out}",
    "graph": "graph {target} {golden} -o {out} --format html --workers 1",
}
CHANGES: dict[str, tuple[str, Callable[[float], float]]] = {
    "norm doubled": ("Norm", lambda value: 2 * value),
    "norm NaN": ("Norm", lambda _: math.nan),
    "largest NaN": ("Max", lambda _: math.nan),
}
"""The mean is none of them: twice a mean near zero is less than the round-off of a sum."""
NO_OTHER_NUMBER = "zero, doubled, is zero; memory that nobody has written has no number (null); True and False are no numbers"


def tensors(node: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, tensor) of everything below a record."""
    if isinstance(node, dict) and "Max" in node:
        yield place, node
        return
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from tensors(child, f"{place}.{key}")


def changed(document: dict[str, Any], change: str) -> Iterator[tuple[str, str]]:
    """(name of the record and place, the text) of each tensor that can have another number."""
    key, other = CHANGES[change]
    for record, content in document["data"].items():
        for place, tensor in tensors(content):
            value = tensor[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or other(value) == value:
                continue  # NO_OTHER_NUMBER
            tensor[key] = other(value)
            yield f"{record} {place}", json.dumps(document)
            tensor[key] = value


CELLS = [("norm doubled", len(COMMANDS)), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in CHANGES)]
"""What is changed, and in how many records one; in the fast tier each record in turn under one command."""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("change", "stride"), CELLS)
@pytest.mark.fast_cells("norm doubled-3-compare")
def test_a_number_that_differs_is_found(
    change: str, stride: int, command: str, small_dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the record: a view, a cast, what goes into a module whose calls were recorded, what gives its form only."""
    sides = {side: tmp_path / side for side in ("target", "golden")}
    for place in sides.values():
        shutil.copytree(small_dump / "step0", place / "step0")
    file = sides["target"] / "step0/rank0/dump.json"
    cells, missed = 0, []
    first_one = list(COMMANDS).index(command) % stride
    for what, text in islice(changed(json.loads(file.read_text()), change), first_one, None, stride):
        file.write_text(text)
        code = main([part.format(**sides, out=tmp_path / "out") for part in COMMANDS[command].split()])
        first = "\n".join(capsys.readouterr().out.split("\n")[:3])
        cells += 1
        if code != 1 or what.split()[0] not in first:
            missed.append(f"{what}: exit code {code}, {first.splitlines()[0] if first else 'nothing said'}")
    assert cells > 100 // stride
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize(("record", "row"), [("Functional.embedding.0.forward", 1), ("Tensor.view.0.forward", 0)])
def test_nan_of_one_side_that_nothing_shows_behind(
    record: str, row: int, small_dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row of the table that no token has looked up, and a damaged number in a view: neither is memory that nobody has written."""
    for side in ("target", "golden"):
        shutil.copytree(small_dump / "step0", tmp_path / side / "step0")
    file = tmp_path / "target/step0/rank0/dump.json"
    document = json.loads(file.read_text())
    taken = document["data"][record]["input_args"][row]
    taken |= dict.fromkeys(("Max", "Min", "Mean", "Norm") if row else ("Max",), math.nan)
    file.write_text(json.dumps(document))
    assert main(["diagnose", str(tmp_path / "target"), str(tmp_path / "golden"), "-o", str(tmp_path / "out")]) == 1
    assert record in "".join(capsys.readouterr().out.split("\n")[:3])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_cast_that_another_call_uses(command: str, small_dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A view or cast whose result goes into calls of one side only is no origin beside others, and a finding where nothing else differs."""
    sides = {side: tmp_path / side for side in ("target", "golden")}
    for place in sides.values():
        shutil.copytree(small_dump / "step0", place / "step0")
    for name in ("dump.json", "construct.json", "stack.json"):
        file = sides["target"] / "step0/rank0" / name
        file.write_text(file.read_text().replace("Torch.softmax.0", "Torch.sigmoid.0"))
    file = sides["target"] / "step0/rank0/dump.json"
    document = json.loads(file.read_text())
    taken = document["data"]["Tensor.to.0.forward"]["input_args"][0]
    taken |= {key: 2 * taken[key] for key in ("Max", "Min", "Mean", "Norm")}
    file.write_text(json.dumps(document))
    code = main([part.format(**sides, out=tmp_path / "out") for part in COMMANDS[command].split()])
    first = capsys.readouterr().out.split("\n")[0]
    assert code == 1
    assert "Tensor.to.0.forward" in first, first


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_tensor_that_is_made_of_a_number(value: float, small_dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no copy of a gradient on its way to the update, nor memory that nobody has written: another number in it is found."""
    for side in ("target", "golden"):
        shutil.copytree(small_dump / "step0", tmp_path / side / "step0")
    file = tmp_path / "target/step0/rank0/dump.json"
    document = json.loads(file.read_text())
    (made,) = document["data"]["Torch.tensor.1.forward"]["output"]  # the count of steps that the optimizer begins with
    assert made["Norm"] == 0
    made |= dict.fromkeys(("Max", "Min", "Mean", "Norm"), value)
    file.write_text(json.dumps(document))
    assert main(["diagnose", str(tmp_path / "target"), str(tmp_path / "golden"), "-o", str(tmp_path / "out")]) == 1
    assert "Torch.tensor.1.forward" in capsys.readouterr().out.split("\n")[0]
