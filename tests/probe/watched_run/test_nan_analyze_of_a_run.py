"""``msprobe nan_analyze`` of the output directory of a run takes its incidents and its monitor for what they are: a NaN in a step of which
there is no dump is found, and what could not be read of them is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.schema import DumpSettings, IncidentSettings, MonitorSettings, ProbeSettings, RuleSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
STEPS, BAD = 6, 3


def train(setup: ProbeSettings, bad: bool) -> dict[str, Any]:
    """The tiny job, in whose midst a parameter becomes NaN."""
    probe = TorchProbe(setup)
    job = pr.gpt.Job(pr.TINY)
    probe.attach(job.model, job.optimizer)
    for step in range(STEPS):
        if bad and step == BAD:
            with torch.no_grad():
                next(job.model.parameters()).view(-1)[0] = float("nan")
        probe.begin_step(step)
        probe.end_step({"loss": job.step()})
    probe.close()
    return {}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One with a NaN, and one without; step 1 alone was dumped."""
    found = {}
    for name in ("bad", "fine"):
        found[name] = tmp_path_factory.mktemp(name)
        setup = ProbeSettings(
            output_dir=str(found[name]),
            monitor=MonitorSettings(parameters=True),
            dump=DumpSettings(level="mix", step=[1]),
            rules=[RuleSettings(rule="nan_inf")],
            incident=IncidentSettings(level="mix", capture_level=""),
        )
        pr.run(train, setup, name == "bad", directory=found[name])
    return found


def without(run: Path, there: Path, *names: str) -> Path:
    """A copy of a run that lacks some of its directories."""
    shutil.copytree(run, there)
    for name in names:
        shutil.rmtree(there / name)
    return there


def analyze(run: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["nan_analyze", "-i", str(run), "-o", str(out)])
    return code, "".join(capsys.readouterr())


def test_a_run_without_a_nan(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = analyze(runs["fine"], tmp_path, capsys)
    assert code == 0, said
    assert "step 1: no NaN or Inf that matters" in said
    assert f"steps 0 to {STEPS - 1}: no NaN or Inf that a rule or a number tells of, rank 0" in said


@pytest.mark.parametrize("lacks", [(), ("dump",), ("monitor",), ("incidents",), ("dump", "incidents")], ids="-".join)
def test_whatever_is_left_of_a_run_tells(
    lacks: tuple[str, ...], runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dump of another step is clean; an incident has more than the monitor's alert."""
    run = without(runs["bad"], tmp_path / "run", *lacks)
    code, said = analyze(run, tmp_path / "out", capsys)
    assert code == 1, said
    first = said.splitlines()[0]
    assert first.startswith("First NaN")
    assert f"step {BAD}, rank 0" in first
    assert f"Read from: {'monitor' if 'incidents' in lacks else f'incident step{BAD}-nan_inf'}." in said
    (file,) = (tmp_path / "out").glob("anomaly_analyze_*.json")
    assert {item["step"] for item in json.loads(file.read_text())["rank_0"]} == {BAD}


def test_the_run_by_another_name(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``latest`` is a link to a run: nothing of it is left out."""
    (tmp_path / "latest").symlink_to(runs["bad"])
    code, said = analyze(tmp_path / "latest", tmp_path / "out", capsys)
    assert code == 1
    assert f"Read from: incident step{BAD}-nan_inf." in said
    assert main(["diagnose", str(tmp_path / "latest"), "-o", str(tmp_path / "d")]) == 1
    assert f"step{BAD}-nan_inf" in capsys.readouterr().out


def test_an_infinity_that_does_not_matter(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded calls of a step are clean: an alert of one of its activations is no finding; one of a gradient, or of a step without
    records, is."""
    for step, family, expected in ((1, "actv", 0), (1, "grad_reduced", 1), (2, "actv", 1)):
        run = without(runs["fine"], tmp_path / f"{step}{family}")
        alert = {"rule": "nan_inf", "severity": "critical", "kind": "activation", "step": step, "rank": 0, "name": "a", "value": "Infinity"}
        (directory,) = (run / "monitor").iterdir()
        (directory / "alerts.jsonl").write_text(json.dumps({**alert, "message": "a is Inf", "extra": {"family": family}}) + "\n")
        code, said = analyze(run, tmp_path / "out", capsys)
        assert code == expected, said


def test_alerts_that_were_taken_away(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without incidents and alerts nothing is found, and nothing is called clean."""
    run = without(runs["bad"], tmp_path / "run", "incidents")
    for file in run.glob("monitor/*/alerts.jsonl"):
        file.write_text("")
    code, said = analyze(run, tmp_path / "out", capsys)
    assert code == 3
    assert "0 alerts are in it, and losses.json says that" in said


def test_numbers_that_no_rule_has_looked_at(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A monitor without rules: its numbers are looked at."""
    run = without(runs["bad"], tmp_path / "run", "incidents")
    for file in run.glob("monitor/*/run.json"):
        info = json.loads(file.read_text())
        file.write_text(json.dumps({key: value for key, value in info.items() if key not in ("rules", "alerts")}))
        (file.parent / "alerts.jsonl").unlink()
    code, said = analyze(run, tmp_path / "out", capsys)
    assert code == 1, said
    assert f"step {BAD}, rank 0" in said


def test_a_run_of_which_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: dict[str, Path]) -> None:
    """Without a step there is nothing to be clean: what was lost is said."""
    run = without(runs["fine"], tmp_path / "run", "dump")
    (directory,) = (run / "monitor").iterdir()
    for table in directory.glob("*.csv"):
        table.unlink()
    lost = {"csv": {"steps": STEPS, "first": 0, "last": STEPS - 1, "alerts": 0, "why": "ENOSPC"}}
    (directory / "losses.json").write_text(json.dumps({"version": 1, "alerts": 0, "lost": lost}))
    code, said = analyze(run, tmp_path / "out", capsys)
    assert code == 2
    assert "there is no step to look at" in said
    assert "No NaN" not in said
    assert f"sink csv of rank 0 has lost {STEPS} steps" in said
    assert "the disk was full" in said


@pytest.mark.parametrize(("level", "said"), [("L0", True), ("mix", False), ("", False)])
def test_what_modules_alone_do_not_show_is_said(level: str, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a dump of modules; not where calls were recorded, and not of a monitor, which has none."""
    dump = DumpSettings(level=level, step=[1]) if level else None
    setup = ProbeSettings(
        output_dir=str(tmp_path), monitor=MonitorSettings(parameters=True), dump=dump, rules=[RuleSettings(rule="nan_inf")]
    )
    pr.run(train, setup, False, directory=tmp_path)
    assert main(["nan_analyze", str(tmp_path)]) == 0
    assert ("Only modules were recorded" in capsys.readouterr().out) == said
