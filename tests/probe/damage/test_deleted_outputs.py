"""Who deletes the output of a run in its midst loses what was there and nothing else: the training ends with the same bits, the log names
the directory once, later steps are written, and every command that reads what is left says what is gone and calls it no whole run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.schema import (
    CsvSettings,
    DumpSettings,
    JsonLinesSettings,
    MonitorSettings,
    ProbeSettings,
    RuleSettings,
    SinkSettings,
    SqliteSettings,
)
from msprobe_engine.probe import writer

pytestmark = pytest.mark.framework
STEPS, DELETED = 8, 4
OFF = CsvSettings(enabled=False)
SINKS = {
    "csv": SinkSettings(),
    "jsonl": SinkSettings(csv=OFF, jsonl=JsonLinesSettings(enabled=True)),
    "sqlite": SinkSettings(csv=OFF, sqlite=SqliteSettings(enabled=True)),
}
READERS = {
    "diagnose": ("diagnose",),
    "nan_analyze": ("nan_analyze", "-i"),
    "trends": ("trends", "-o", "{out}/trends.html"),
    "analyze": ("monitor", "analyze", "-o", "{out}"),
    "report": ("monitor", "report", "-o", "{out}/report.html"),
    "show": ("show",),
}
SAID = "files were deleted or moved away while the run wrote them"


def settings(run: Path, sinks: SinkSettings, steps: list[int]) -> ProbeSettings:
    return ProbeSettings(
        output_dir=str(run),
        monitor=MonitorSettings(parameters=True),
        dump=DumpSettings(level="mix", step=steps),
        rules=[RuleSettings(rule="nan_inf")],
        sinks=sinks,
    )


def train_and_delete(setup: ProbeSettings, gone: str, renamed: str = "") -> dict[str, Any]:
    """A training in whose midst a directory is deleted, or gets another name, for longer than the writer waits for whoever deletes it."""
    writer.AWAY_SECONDS = 0.0
    return pr.train_with_probe(setup, STEPS, before_step={DELETED: lambda: _take_away(Path(gone), renamed)})


def _take_away(path: Path, renamed: str) -> None:
    """A directory in which something is made meanwhile cannot be deleted, so it gets another name first."""
    there = path.rename(renamed or path.with_name("gone"))
    if not renamed:
        shutil.rmtree(there)


def read(name: str, run: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code of a command on a run, and what it says."""
    out.mkdir(exist_ok=True)
    words = [word.format(out=out) for word in READERS[name]]
    at = words.index("-i") + 1 if "-i" in words else len(words) if name in ("diagnose", "show") else words.index("-o")
    code = main([*words[:at], str(run), *words[at:]])
    return code, "".join(capsys.readouterr())


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.fast_cells("jsonl")
def test_a_run_that_was_deleted_in_its_midst(
    sink: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is deleted; the monitor's files and a dump of a later step are made anew."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    done = pr.run(train_and_delete, settings(run, SINKS[sink], [1, 6]), str(run), directory=tmp_path)[0]
    assert pr.is_same_training(done.value, pr.run(pr.train_alone, STEPS, directory=tmp_path)[0].value)
    assert len(done.lines(f"sink {sink} lost data", "steps 0 to 3 went with it")) == 1
    assert len(done.lines("dump was deleted or moved away", "1 steps went with it")) == 1
    for name in READERS:
        code, said = read(name, run, tmp_path / "out", capsys)
        assert (name, code) == (name, 3), said
        assert SAID in said, (name, said)
        assert "has lost 4 steps, or parts of them (from step 0 to step 3)" in said, (name, said)


def test_a_run_that_ends_soon_after_it_was_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever deletes it is not disturbed: no file of the monitor comes into what is being deleted. At its end the run tells."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    done = pr.run(train_and_delete_at_the_end, settings(run, SINKS["csv"], [1]), run, directory=tmp_path)[0]
    assert done.value["lost"] == {"csv": STEPS}
    code, said = read("diagnose", run, tmp_path / "out", capsys)
    assert code == 3
    assert f"has lost {STEPS} steps, or parts of them (from step 0 to step {STEPS - 1})" in said
    assert f"with 0 alerts: the {SAID}" in said  # no other cause is guessed
    assert "killed" not in said


def train_and_delete_at_the_end(setup: ProbeSettings, run: Path) -> dict[str, Any]:
    return pr.train_with_probe(setup, STEPS, lambda _: {"there": run.exists()}, {DELETED: lambda: _take_away(run, "")})


def test_a_dump_that_was_deleted_in_its_midst(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No monitor watches: the later step says that the earlier one is gone."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    setup = replace(settings(run, SINKS["csv"], [1, 6]), monitor=None, rules=[])
    done = pr.run(train_and_delete, setup, str(run / "dump"), directory=tmp_path)[0]
    assert len(done.lines("dump was deleted or moved away", "1 steps went with it")) == 1
    for name in ("diagnose", "nan_analyze", "trends", "show"):
        code, said = read(name, run, tmp_path / "out", capsys)
        assert (name, code) == (name, 3), said
        assert "steps that were deleted with their directory 1" in said, said


def test_a_step_that_was_tidied_up_is_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever removes a step of a dump, to have room, knows it; the others are whole."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    done = pr.run(train_and_delete, settings(run, SINKS["csv"], [1, 2, 6]), str(run / "dump" / "step2"), directory=tmp_path)[0]
    assert not done.lines("was deleted or moved away")
    for name in ("diagnose", "nan_analyze", "show"):
        code, said = read(name, run, tmp_path / "out", capsys)
        assert (name, code) == (name, 0), said


@pytest.mark.fast_cells("csv")
@pytest.mark.parametrize("sink", SINKS)
def test_a_run_that_was_moved_away(sink: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written stays readable where it is now; the run goes on in its own place, and says there that its beginning is not."""
    monkeypatch.chdir(tmp_path)
    run, away = tmp_path / "run", tmp_path / "away"
    done = pr.run(train_and_delete, settings(run, SINKS[sink], [1, 6]), str(run), str(away), directory=tmp_path)[0]
    assert pr.is_same_training(done.value, pr.run(pr.train_alone, STEPS, directory=tmp_path)[0].value)
    for place in (run, away):
        code, said = read("diagnose", place, tmp_path / "out", capsys)
        assert code == 3, said
    code, said = read("nan_analyze", away, tmp_path / "out", capsys)
    assert "step 1: no NaN or Inf that matters" in said


def test_where_nothing_can_be_made_again(tmp_path: Path) -> None:
    """A file stands where the run was: what is open is gone on with, the rest is counted as lost, the training ends with the same bits."""
    run, away = tmp_path / "run", tmp_path / "away"

    done = pr.run(train_beside_a_file, settings(run, SINKS["csv"], [1, 6]), run, away, directory=tmp_path)[0]
    assert pr.is_same_training(done.value, pr.run(pr.train_alone, STEPS, directory=tmp_path)[0].value)
    tables = "".join(table.read_text() for table in away.glob("monitor/*/scalars_*.csv"))
    assert f"{STEPS - 1},loss," in tables
    assert done.value["lost"] == {"csv": STEPS - DELETED, "dump": 1} or done.value["lost"] == {"dump": 1}


def train_beside_a_file(setup: ProbeSettings, run: Path, away: Path) -> dict[str, Any]:
    def put_file() -> None:
        run.rename(away)
        run.write_text("not a directory")

    return pr.train_with_probe(setup, STEPS, before_step={DELETED: put_file})
