"""Examples of docs/guide/grad-probe.md, docs/guide/prometheus.md and docs/frameworks/megatron.md."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import probe_ranks as pr
import pytest
import torch
from page_blocks import Tokens, batches, block, blocks, commands, loss_of, run

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.load import load_settings

GRAD = "docs/guide/grad-probe.md"


def collect(name: str, damage: float) -> None:
    """The training of the page; the second run computes its last layer wrongly from update 2 on."""
    settings = json.loads(block(GRAD, "json", "## Collect"))
    Path("config.json").write_text(json.dumps({**settings, "dump_path": name}))
    model = Tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = run(block(GRAD, "python", "## Collect"), GRAD, {"model": model})
    for step, batch in enumerate(batches(4)):
        loss_of(model, batch).backward()
        if step >= 2:
            model[2].weight.grad *= damage
        optimizer.step()
        optimizer.zero_grad()
    names["debugger"].stop()


@pytest.mark.framework
def test_grad_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both runs are collected as the page says, and the command names parameter and step; the exit code is 1."""
    monkeypatch.chdir(tmp_path)
    for name, damage in (("run_a", 1.0), ("run_b", -1.0)):
        pr.run(collect, name, damage, directory=tmp_path)
    (words,) = commands(block(GRAD, "", "## Compare"))
    assert main(words) == 1
    (table,) = Path("out").rglob("similarities.csv")
    assert table.is_file()
    (suspects,) = Path("out").rglob("suspects.csv")
    found = list(csv.DictReader(suspects.open()))
    assert any("2.weight" in row.values() and "2" in row.values() for row in found)
    assert "2.weight" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["docs/guide/prometheus.md", "docs/frameworks/megatron.md"])
def test_settings(tmp_path: Path, page: str) -> None:
    """The settings of the page load without a mistake."""
    path = tmp_path / "probe.yaml"
    (text,) = blocks(page, "yaml")
    path.write_text(text)
    assert load_settings(path).sinks.prometheus.enabled
