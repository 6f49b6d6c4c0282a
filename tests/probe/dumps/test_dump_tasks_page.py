"""docs/guide/dump.md: every task of the page runs as it stands and makes the dump that the page says."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from msprobe_engine.core.settings import hot
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.formats.dump.notebook.step_dump import StepDump
from msprobe_engine.formats.dump.reader import open_dump

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]
PAGE = Path(__file__).parents[3] / "docs" / "guide" / "dump.md"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.mlp(self.norm(x)))


class Model(nn.Module):
    """What the examples call `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def section(title: str) -> tuple[dict[str, Any], list[str]]:
    """Settings and Python blocks of one task; one that has no loop of its own has that of the first."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert text, title
    (settings,) = re.findall(r"^```json\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    found = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return json.loads(settings), found or section("Dump one step")[1]


def run(title: str, directory: Path, monkeypatch: pytest.MonkeyPatch, batches: Any = None) -> dict[str, Any]:
    """Run a task of the page in `directory`."""
    monkeypatch.chdir(directory)
    settings, blocks = section(title)
    Path("config.json").write_text(json.dumps(settings))
    model = Model()
    names: dict[str, Any] = {"model": model, "batches": batches if batches is not None else [torch.randn(2, 4) for _ in range(4)]}
    names["optimizer"] = torch.optim.SGD(model.parameters(), 0.1)
    assert blocks
    for code in blocks:
        exec(compile(code, str(PAGE), "exec"), names)
    names["debugger"].run.at_exit()
    return names


def load(step: int) -> StepDump:
    return open_dump("out").load(step)


def test_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The listed step alone, with modules, functions and gradients; the lines that the page shows."""
    run("Dump one step", tmp_path, monkeypatch)
    assert open_dump("out").steps == [2]
    names = set(load(2).entries)
    assert {"Module.layers.4.Block.forward.0", "Torch.relu.4.backward", "Module.head.Linear.parameters_grad.0"} <= names
    said = capsys.readouterr().err
    shown = re.search(r"^```text\n(.*?)^```", PAGE.read_text().partition("## Dump one step")[2], re.DOTALL | re.MULTILINE)
    assert shown is not None
    for line in shown[1].splitlines():
        assert re.search(
            re.sub(r"[\d.,]*\d", r"[\\d.,]+", line.replace("/job", str(tmp_path)).replace("(", r"\(").replace(")", r"\)")), said
        ), line


def test_only_layer_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of that layer alone."""
    run("Dump only layer 3", tmp_path, monkeypatch)
    names = list(load(1).entries)
    assert "Module.layers.3.Block.backward.0" in names
    assert all(n.startswith("Module.layers.3.") for n in names)


def test_chosen_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen module alone, under its own name, without its children."""
    run("Dump one module under a name of your own", tmp_path, monkeypatch)
    assert list(load(0).entries) == ["Module.the.third.Block.forward.0"]


def test_one_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both steps with their variables, the gradient in its place."""
    run("Save one variable", tmp_path, monkeypatch)
    assert open_dump("out").steps == [0, 1]
    entries = load(1).entries
    assert list(entries) == ["hidden.0.debug", "hidden_grad.0.debug", "numbers.0.debug"]
    assert [place for place, _ in entries["hidden_grad.0.debug"].tensors()] == [""]
    assert [place for place, _ in entries["numbers.0.debug"].tensors()] == ["loss", "parts.0"]


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of ten, in each step, numbered from 0."""
    run("Dump some tokens", tmp_path, monkeypatch)
    assert open_dump("out").steps == [0, 1, 2, 3]
    for step in (0, 3):
        names = [n for n in load(step).entries if n.startswith("Module.head.")]
        assert names == [f"Module.head.Linear.forward.{n}" for n in range(3)]


class Switched(list):  # type: ignore[type-arg]
    """Batches; before the third one somebody changes the file, and the time the tool lets pass is over."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number == 2:
                path = Path("config.json")
                path.write_text(path.read_text().replace("false", "true"))
            yield batch


def test_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off for two steps, then on, by the change that the page describes."""
    monkeypatch.setattr(hot, "SECONDS_OFF", 0.0)
    run("Switch it on while the training runs", tmp_path, monkeypatch, Switched(torch.randn(2, 4) for _ in range(4)))
    assert open_dump("out").steps == [2, 3]


def test_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is a record with both directions, what runs inside is none."""
    module: Any = types.ModuleType("my_ops")
    module.scaled = lambda x: x * torch.ones(4, requires_grad=True) * 2
    monkeypatch.setitem(sys.modules, "my_ops", module)
    run("Record a function of your own", tmp_path, monkeypatch)
    assert [n for n in load(0).entries if "my_ops" in n] == ["my_ops.scaled.0.forward", "my_ops.scaled.0.backward"]
    assert not [n for n in load(0).entries if "mul" in n or "ones" in n]


def test_settings_without_a_change_to_the_program() -> None:
    """The section ``dump`` of the page, and the command that asks why a record is not there."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Without a change to the program\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    dump = load_settings(yaml.safe_load(block)).dump
    assert dump is not None
    assert (dump.step, dump.level, dump.list, dump.summary_mode) == ((2,), "mix", ("layers.3.",), "md5")
    assert "msprobe show runs/today --why " in text
