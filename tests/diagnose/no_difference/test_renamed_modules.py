"""Modules that bear other names: said as such, written as a mapping, and no difference with one, in compare and diagnose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from msprobe_engine.align.mapping.user_mapping import Mappings
from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import UsageError
from msprobe_engine.find.run import diagnose

Capture = pytest.CaptureFixture[str]


def _tensor(value: float) -> dict[str, Any]:
    return {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [4, 4],
        "Max": value,
        "Min": -value,
        "Mean": value / 3,
        "Norm": value,
    }


def _dump(root: Path, attribute: str, cls: str, more: bool = False) -> Path:
    """One process: three blocks with a module of one function inside; `more`: one call of the last block is made twice."""
    data: dict[str, Any] = {}
    construct: dict[str, Any] = {}
    value = 1.0

    def record(name: str, parent: str | None) -> None:
        data[name] = {"input_args": [_tensor(value)], "input_kwargs": {}, "output": [_tensor(value + 1)]}
        construct[name] = parent

    calls = 0
    for i in range(3):
        block = f"Module.layers.{i}.Block.forward.0"
        inner = f"Module.layers.{i}.{attribute}.{cls}.forward.0"
        leaf = f"Module.layers.{i}.{attribute}.q.Linear.forward.0"
        for _ in range(2 if more and i == 2 else 1):
            record(f"Functional.linear.{calls}.forward", leaf)
            calls += 1
        record(leaf, inner)
        record(inner, block)
        record(block, None)
        value += 1
    place = root / f"step0/proc{len(str(root))}"
    place.mkdir(parents=True)
    header = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    (place / "dump.json").write_text(json.dumps(header | {"data": data}))
    (place / "construct.json").write_text(json.dumps(construct))
    (place / "stack.json").write_text("{}")
    return root


@pytest.mark.parametrize("cls", ["Attention", "SelfAttention"])
@pytest.mark.parametrize("command", ["diagnose", "compare"])
def test_other_names_are_said_and_written(tmp_path: Path, capsys: Capture, command: str, cls: str) -> None:
    """No call is said to be missing; the file that is written makes the runs equal."""
    target, golden = _dump(tmp_path / "t", "attn", cls), _dump(tmp_path / "gold", "attention", "Attention")
    words = [command, str(target), str(golden), "-o", str(tmp_path / "out")]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert out.startswith("Modules bear other names")
    assert f"6 modules bear other names in the golden run: layers.0.attn.{cls} -> layers.0.attention.Attention, " in out
    assert "\n  only in " not in out
    (file,) = (tmp_path / "out").glob("cell_mapping*.yaml")
    assert f"-cm {file}" in out
    assert yaml.safe_load(file.read_text())["layers.2.attn.q.Linear"] == "layers.2.attention.q.Linear"
    for flag in ("-cm", "-dm"):
        assert main([*words, flag, str(file)]) == 0
        assert capsys.readouterr().out.startswith("No difference beyond round-off")


def test_calls_that_are_missing_besides_are_said(tmp_path: Path, capsys: Capture) -> None:
    """Other names and one call more: with the mapping the call alone is left."""
    target, golden = _dump(tmp_path / "t", "attn", "Attention", more=True), _dump(tmp_path / "gold", "attention", "Attention")
    assert main(["diagnose", str(target), str(golden), "-o", str(tmp_path / "out")]) == 1
    assert "modules bear other names" in capsys.readouterr().out
    found = diagnose(target, golden)
    assert found.unmatched["target"] == ["Functional.linear.3.forward"]
    assert not found.headline().startswith("Modules bear other names")
    assert main(["diagnose", str(target), str(golden), "-o", str(tmp_path / "o"), "-cm", str(tmp_path / "out/cell_mapping.yaml")]) == 1
    out = capsys.readouterr().out
    assert "Functional.linear.3.forward" in out
    assert "modules bear other names" not in out


@pytest.mark.parametrize("command", ["diagnose", "compare"])
def test_layers_by_their_classes(tmp_path: Path, command: str) -> None:
    """A layer mapping of two lines makes the finding `none`, with class and attribute renamed."""
    target, golden = _dump(tmp_path / "t", "attn", "SelfAttention"), _dump(tmp_path / "gold", "attention", "Attention")
    (tmp_path / "lm.yaml").write_text("Block:\n  attn: attention\n")
    words = [command, str(target), str(golden), "-o", str(tmp_path / "out")]
    assert main([*words, "-lm", str(tmp_path / "lm.yaml")]) == 0


def test_a_mapping_needs_two_runs(tmp_path: Path, capsys: Capture) -> None:
    """And a file that can be read; both are said in one line."""
    target = _dump(tmp_path / "t", "attn", "Attention")
    assert main(["diagnose", str(target), "-cm"]) == 2
    assert "give two runs" in capsys.readouterr().err
    assert main(["diagnose", str(target), str(_dump(tmp_path / "g", "attn", "Attention")), "-cm", str(tmp_path / "none.yaml")]) == 2
    assert "cell mapping" in capsys.readouterr().err
    with pytest.raises(UsageError):
        diagnose(target, target, mappings=Mappings(cell=3))
