"""`msprobe show` and the overview behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.errors import UsageError
from msprobe_engine.overview import look


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output directory with one of everything."""
    for step, rank in [(0, "rank0"), (0, "rank10"), (0, "rank2"), (12, "rank0")]:
        here = tmp_path / "dump" / f"step{step}" / rank
        here.mkdir(parents=True)
        (here / "dump.json").write_text("{}")
    (tmp_path / "dump/step12/rank0/dump_tensor_data").mkdir()
    (tmp_path / "dump/step12/rank0/dump_tensor_data/a.pt").write_bytes(b"")
    (tmp_path / "dump/step12/rank1").mkdir()
    (tmp_path / "dump/step12/rank1/.incomplete").write_text("")
    (tmp_path / "dump/step13/proc77").mkdir(parents=True)
    (tmp_path / "incidents/step12").mkdir(parents=True)
    (tmp_path / "incidents/step12/incident.json").write_text('{"step": 12, "rank": 1, "rule": "nan_inf", "x": [1]}')
    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor/actv_0-9.csv").write_text("")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard/events.out.tfevents.1.host").write_text("")
    return tmp_path


def test_everything_is_listed(output: Path) -> None:
    """Dumped steps with their ranks in numeric order, marks of incomplete ranks, incidents, tables and event files are listed."""
    assert look(output).text().splitlines() == [
        str(output),
        "dump dump: 3 steps",
        "  step 0: rank0, rank2, rank10",
        "  step 12: rank0 (1 tensors), rank1 (INCOMPLETE)",
        "  step 13: proc77 (no dump.json)",
        "incidents: 1",
        "  incidents/step12: step 12, rank 1, rule nan_inf",
        "tables monitor: 1 CSV file",
        f"TensorBoard tensorboard: tensorboard --logdir {output}/tensorboard",
    ]


def test_json_holds_the_same(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the listing as data."""
    assert main(["show", str(output), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["dumps"]["dump"]["12"][1] == {"rank": "rank1", "files": [], "tensors": 0, "incomplete": True}
    assert tree["incidents"][0]["incident"]["x"] == [1]
    assert tree["tables"] == {"monitor": 1}


def test_a_step_directory_itself_can_be_shown(output: Path) -> None:
    """Given a step directory, its ranks are listed."""
    assert [r.name for r in look(output / "dump/step0").dumps["."][0]] == ["rank0", "rank2", "rank10"]


def test_a_damaged_incident_is_still_listed(output: Path) -> None:
    """An unreadable incident.json does not hide the incident."""
    (output / "incidents/step12/incident.json").write_text("{")
    assert look(output).incidents == [("incidents/step12", {})]


def test_a_missing_directory_is_a_usage_error(tmp_path: Path) -> None:
    """A path that is no directory is answered with what to give."""
    with pytest.raises(UsageError, match="no such directory"):
        look(tmp_path / "x")
