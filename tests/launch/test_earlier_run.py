"""A run that writes where another one has written says so when it begins, once and on rank 0; files of the first stay as they are."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

from msprobe.pytorch import TorchProbe
from msprobe_engine.cli.main import main
from msprobe_engine.formats.monitor.reader import open_run

pytestmark = pytest.mark.framework

SINKS = {
    "csv": "csv: {enabled: true}",
    "csv elsewhere": "csv: {enabled: true, path: tables}",
    "jsonl": "csv: {enabled: false}, jsonl: {enabled: true}",
    "sqlite": "csv: {enabled: false}, sqlite: {enabled: true}",
}


def train() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe.from_config("probe.yaml")
    probe.attach(model, optimizer)
    for step in range(2):
        probe.begin_step(step)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        probe.end_step()
    probe.close()


def tables() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path().rglob("*.csv")}


@pytest.mark.parametrize("sinks", SINKS.values(), ids=SINKS)
def test_a_used_directory_is_said(sinks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A launcher that starts the job again makes it a remark."""

    def said() -> list[str]:
        train()
        return [line for line in capsys.readouterr().err.splitlines() if "holds another run" in line]

    monkeypatch.chdir(tmp_path)
    Path("probe.yaml").write_text(f"output_dir: out\nmonitor: {{gradients: true}}\nsinks: {{{sinks}}}\n")
    assert said() == []
    before = tables()
    (line,) = said()
    assert "[WARNING]" in line
    assert tables().items() >= before.items()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (line,) = said()
    assert "[INFO]" in line


def run(place: Path, steps: range, bad: int = -1) -> None:
    """One launch in `place`; NaN goes into step `bad`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe.from_config(str(place / "probe.yaml"))
    probe.attach(model, optimizer)
    for step in steps:
        probe.begin_step(step)
        model(torch.full((2, 4), float("nan") if step == bad else 1.0)).sum().backward()
        optimizer.step()
        probe.end_step({"loss": float(step)})
    probe.close()


QUIET = "incident: {enabled: false}\n"
OWN = {name: sinks for name, sinks in SINKS.items() if name != "csv elsewhere"}


@pytest.mark.parametrize("sinks", OWN.values(), ids=OWN)
def test_another_run_is_not_taken_for_this_one(sinks: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A launch that begins where the first one did, or before, is another run, though it is shorter: its numbers and alerts are its own,
    both are named, and the answer is that not all was looked at."""
    (tmp_path / "probe.yaml").write_text(f"output_dir: {tmp_path / 'out'}\nmonitor: {{gradients: true}}\n{QUIET}sinks: {{{sinks}}}\n")
    run(tmp_path, range(2, 8), bad=6)
    run(tmp_path, range(1, 4))
    opened = open_run(tmp_path / "out")
    assert opened.scalars(0)["loss"].steps.tolist() == [1, 2, 3]
    assert {tuple(series.steps) for series in opened.series(0, "grad_reduced", "norm").values()} == {(1, 2, 3)}
    assert opened.alerts(0) == []
    (other,) = opened.other_runs(0)
    for words in (
        ["monitor", "analyze"],
        ["diagnose", "-o", str(tmp_path / "page")],
        ["trends", "-o", str(tmp_path / "trends.html")],
        ["data2db", "--db", str(tmp_path / "db"), "--data"],
    ):
        capfd.readouterr()
        assert main([*words, str(tmp_path / "out")]) == 3
        said = "".join(capfd.readouterr())
        assert f"another run, which started {other.started}, is here and is not looked at; the one that is read started" in said


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("sinks", OWN.values(), ids=OWN)
def test_a_run_that_went_on(sinks: str, restart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that begins at a later step than the first one, or that the launcher says it has started again, is the same run: of a step
    that both have the later numbers count, and all alerts do."""
    (tmp_path / "probe.yaml").write_text(f"output_dir: {tmp_path / 'out'}\nmonitor: {{gradients: true}}\n{QUIET}sinks: {{{sinks}}}\n")
    run(tmp_path, range(5), bad=4)
    if restart:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run(tmp_path, range(0 if restart else 3, 7))
    opened = open_run(tmp_path / "out")
    assert opened.scalars(0)["loss"].steps.tolist() == list(range(7))
    assert opened.other_runs(0) == []
    assert {alert["step"] for alert in opened.alerts(0)} == {4}
    assert main(["monitor", "analyze", str(tmp_path / "out")]) == 1


def test_rows_of_launches_are_told_apart(tmp_path: Path) -> None:
    """Every line of JSON, and every step of a trend data base, says which launch has written it."""
    sinks = "csv: {enabled: false}, jsonl: {enabled: true}, sqlite: {enabled: true}"
    (tmp_path / "probe.yaml").write_text(f"output_dir: {tmp_path / 'out'}\nmonitor: {{gradients: true}}\n{QUIET}sinks: {{{sinks}}}\n")
    run(tmp_path, range(4))
    run(tmp_path, range(2, 6))
    lines = [json.loads(line) for line in (tmp_path / "out/jsonl/rank0.jsonl").read_text().splitlines()]
    steps = [(line["step"], line["launch"]) for line in lines if "step" in line]
    first, second = dict.fromkeys(launch for _, launch in steps)
    assert list(dict.fromkeys(line["run"]["launch"] for line in lines if "run" in line)) == [first, second]
    assert steps == [(step, first) for step in range(4)] + [(step, second) for step in range(2, 6)]
    with closing(sqlite3.connect(tmp_path / "out/trend/rank0.trend.db")) as db:
        first, second = (number for (number,) in db.execute("SELECT number FROM launches ORDER BY number"))
        found = db.execute("SELECT step, number FROM launch_steps ORDER BY step").fetchall()
    assert found == [(step, second if step >= 2 else first) for step in range(6)]
