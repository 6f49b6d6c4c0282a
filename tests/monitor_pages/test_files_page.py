"""docs/guide/monitor-files.md and docs/guide/trends.md: what they show is written, and their examples read it."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from page_blocks import ROOT, Tokens, batches, block, commands, loss_of, run

from msprobe.pytorch import TorchProbe
from msprobe_engine.cli.main import main

PAGE = "docs/guide/monitor-files.md"
SINKS = "sinks: {memory: true, jsonl: {enabled: true}, sqlite: {enabled: true}, tensorboard: {enabled: true}, csv: {steps_per_file: 100}}\n"
pytestmark = pytest.mark.framework


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A finished run with every sink."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONITOR_OUTPUT_DIR", raising=False)
    Path("probe.yaml").write_text("output_dir: runs/a\nmonitor: {gradients: true, activations: true}\n" + SINKS)
    model = Tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    probe = TorchProbe.from_config("probe.yaml")
    probe.attach(model, optimizer)
    for step, batch in enumerate(batches(4)):
        probe.begin_step(step)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step({"loss": loss})
    probe.close()
    return probe


@pytest.mark.usefixtures("probe")
def test_reading(capsys: pytest.CaptureFixture[str]) -> None:
    """The example of the reader prints a line per parameter with all steps, from each format that the page names."""
    code = block(PAGE, "python", "## Reading")
    assert '"runs/a"' in code
    for where in ("runs/a", "runs/a/monitor", "runs/a/jsonl/rank0.jsonl", "runs/a/trend/rank0.trend.db"):
        names = run(code.replace('"runs/a"', repr(where)), PAGE, {})
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in lines] == [[name, "reduced"] for name, _ in Tokens().named_parameters()]
        assert names["run"].problems == {}
        assert names["run"].scalars(0)["loss"].steps.tolist() == [0, 1, 2, 3]


def test_in_memory(probe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The frames that were kept hold every tensor of every step, after the end too."""
    run(block(PAGE, "python", "## In memory"), PAGE, {"probe": probe})
    out = capsys.readouterr().out
    assert sum(line.startswith("2.weight ") for line in out.splitlines()) == 4
    assert [line.split()[0] for line in out.splitlines() if len(line.split()) == 2] == ["0", "1", "2", "3"]


@pytest.mark.usefixtures("probe")
def test_converting() -> None:
    """Both converters run; what they make is not empty."""
    for words in commands(block(PAGE, "bash", "## Converting")):
        assert main(words) == 0
    assert list(Path("runs/a").glob("*csv2tensorboard_by_step/rank0/*/events*"))
    with sqlite3.connect("runs/a/db/monitor_data.trend.db") as db:
        assert db.execute("SELECT count(*) FROM scalars").fetchone()[0] > 0


@pytest.mark.usefixtures("probe")
def test_files_and_columns() -> None:
    """Directory names, file names and headers are those of the page."""
    (directory,) = Path("runs/a/monitor").iterdir()
    wanted = {"run.json", "losses.json", "scalars_0-99.csv", "actv_0-99.csv", "grad_reduced_0-99.csv"}
    assert wanted == {path.name for path in directory.iterdir()}
    text = (ROOT / PAGE).read_text()
    assert "`vpp_stage,name,step[,micro_step],<ops in the order of the settings>,shape,dtype[,phase][,state][,tag]`" in text
    header = (directory / "grad_reduced_0-99.csv").read_text().splitlines()[0]
    assert header == "vpp_stage,name,step,norm,min,max,mean,nans,zeros,shape,dtype,phase"
    assert (directory / "actv_0-99.csv").read_text().startswith("vpp_stage,name,step,micro_step,norm")


@pytest.mark.usefixtures("probe")
def test_report() -> None:
    """The commands of docs/guide/trends.md write the page of a run, which has each part of the table under its name."""
    for words in commands(block("docs/guide/trends.md", "bash", "## A run on one page")):
        assert main(words) == 0
    page = Path("runs/a/analysis/report-1/report.html").read_text()
    assert Path("page.html").is_file()
    for line in (ROOT / "docs/guide/trends.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith(("| part", "| ---", "| Alerts at")):
            assert f'"{line.split("|")[1].strip()}"' in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
