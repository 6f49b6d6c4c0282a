"""docs/guide/save-tensors.md: its settings and examples run as they stand and make the files that the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from msprobe_engine.formats.dump.notebook.step_dump import StepDump
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.backend import TorchBackend

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]
PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "save-tensors.md").read_text(encoding="utf-8")


class Model(nn.Module):
    """What the examples call `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def run(number: int, directory: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> StepDump:
    """The training of the page with its settings of this number."""
    monkeypatch.chdir(directory)
    monkeypatch.setenv("RANK", "0")
    settings = json.loads(blocks("json")[number])
    settings["tensor"] = {**settings.get("tensor", {}), **changes} if changes else settings.get("tensor", {})
    Path("config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    exec(compile(blocks("python")[0], "save-tensors.md", "exec"), {"model": Model(), "batches": [torch.rand(2, 4) for _ in range(3)]})
    dump = open_dump("out")
    assert dump.steps == [1]
    return dump.load(1)


def named(dump: StepDump) -> set[str]:
    """Records whose tensors have files."""
    return {record for record, entry in dump.entries.items() for _, tensor in entry.tensors() if tensor.data_name}


def test_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files shown are there, torch.load reads them, and everything that is named is there."""
    dump = run(0, tmp_path, monkeypatch)
    for line in re.findall(r"^out/\S+$", blocks("text")[0], re.MULTILINE):
        assert Path(line).is_file(), line
    name = "Module.layers.0.Linear.forward.0.input.0.pt"
    read = torch.load(dump.directory / "dump_tensor_data" / name, weights_only=True)
    assert torch.equal(read, dump.files.load(name, TorchBackend()))
    assert {t.data_name for e in dump.entries.values() for _, t in e.tensors()} == set(dump.files.names())


def test_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the layer, with everything inside it at level mix."""
    dump = run(1, tmp_path, monkeypatch)
    assert named(dump) == set(dump.entries)
    assert {r for r in dump.entries if r.startswith("Module.")} == {
        f"Module.layers.2.Linear.{kind}.0" for kind in ("forward", "backward", "parameters_grad")
    }
    assert any(r.startswith("Functional.linear") for r in dump.entries)


def test_tensor_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of everything, tensors of the listed records."""
    dump = run(2, tmp_path, monkeypatch)
    assert named(dump) == {r for r in dump.entries if r.startswith("Module.layers.2.") or "relu" in r}
    assert len(named(dump)) < len(dump.entries)


def test_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files shown are there, and are read back."""
    dump = run(3, tmp_path, monkeypatch)
    for line in re.findall(r"^out/\S+$", blocks("text")[1], re.MULTILINE):
        assert Path(line).is_file(), line
    assert dump.files.load("Module.layers.0.Linear.forward.0.parameters.weight.pt", TorchBackend()).shape == (4, 4)


def test_what_does_not_fit_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a quota that is too small the last example prints names, sizes and the reason."""
    dump = run(0, tmp_path, monkeypatch, max_disk_gb=0.00002)
    assert dump.header["lost"]["tensors over max_disk_gb"] > 0
    assert 0 < sum(path.stat().st_size for path in Path("out").rglob("*.pt")) <= 20_000
    capsys.readouterr()
    exec(compile(blocks("python")[-1], "save-tensors.md", "exec"), {})
    assert ".pt 64 max_disk_gb 2e-05 is used up" in capsys.readouterr().out
