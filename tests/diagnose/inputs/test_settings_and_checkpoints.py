"""What two runs were started with, and checkpoints, in `msprobe diagnose`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from msprobe_engine.cli.main import main
from msprobe_engine.config.severity import CHANGES, MAY
from msprobe_engine.core.errors import UsageError
from msprobe_engine.find.config.difference import SETTINGS, WEIGHTS, Difference
from msprobe_engine.find.config_and_checkpoint import blame_settings_alone
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.run import diagnose

FIXTURES = Path(__file__).parents[2] / "fixtures"
PACKS = FIXTURES / "config_packs" / "26.2.0"
DUMP = FIXTURES / "26.2.0" / "L0"


def _output(place: Path, pack: str, dump: bool = True) -> Path:
    """An output directory as a run leaves it."""
    place.mkdir()
    shutil.copy(PACKS / f"{pack}.zip", place / "config_check_pack.zip")
    if dump:
        shutil.copytree(DUMP, place / "dump")
    return place


def test_configurations_beside_dumps_that_agree(tmp_path: Path) -> None:
    """A setting that changes the numbers is the finding where no record shows it; what was started with the same is said to be so."""
    a, b = _output(tmp_path / "a", "planted"), _output(tmp_path / "b", "base")
    for target, golden in ((a, b), (a / "dump", b / "dump")):
        found = diagnose(target, golden)
        said = "The configurations differ; no number that was recorded shows it: hyperparameters learning_rate / lr 1e-4, golden 3e-4"
        assert (found.finding, found.headline()) == ("config", said)
        assert found.suspects[0].why == "1e-4, golden 3e-4; every update is scaled by it"
        assert any("learning_rate / lr: 1e-4, golden 3e-4" in line for line in found.evidence)
        assert "records" in found.looked_at
    same = _output(tmp_path / "c", "again")
    found = diagnose(same, b)
    assert found.finding == "none"
    assert any(line.startswith("Configuration: No difference") for line in found.evidence)


def test_settings_that_only_may_matter_are_no_finding() -> None:
    """Of settings that may change numbers, and of samples and weights, the records that agree say that they did not."""
    for sheet, severity, expected in ((SETTINGS, CHANGES, "config"), (SETTINGS, MAY, "none"), (WEIGHTS, CHANGES, "none")):
        found = Diagnosis()
        blame_settings_alone(found, [Difference(sheet, "tp", "tp", "1", "2", severity, "a reason")])
        assert found.finding == expected


def test_a_run_without_a_pack_says_nothing_of_it(tmp_path: Path) -> None:
    """Where one side has no pack, nothing is compared and nothing claimed."""
    a, b = _output(tmp_path / "a", "planted"), tmp_path / "b"
    shutil.copytree(DUMP, b / "dump")
    assert not any("onfiguration" in line for line in diagnose(a, b).evidence)


@pytest.mark.parametrize("name", ["earlier-1", "run-2"])
def test_the_pack_of_the_directory_above_is_that_of_another_run(name: str, tmp_path: Path) -> None:
    """What an earlier run has left, or a second one writes, is not compared with its own configuration."""
    run = _output(tmp_path / "run", "planted")
    shutil.copytree(DUMP, run / name / "dump")
    for golden in (run / name, run / name / "dump"):
        assert not any("onfiguration" in line for line in diagnose(run, golden).evidence)
    shutil.copy(PACKS / "base.zip", run / name / "config_check_pack.zip")
    assert any("learning_rate / lr: 1e-4, golden 3e-4" in line for line in diagnose(run, run / name).evidence)


def test_output_directories_with_packs_alone(tmp_path: Path) -> None:
    """When nothing else is there, the packs are what is diagnosed."""
    a, b = _output(tmp_path / "a", "planted", dump=False), _output(tmp_path / "b", "base", dump=False)
    found = diagnose(a, b)
    assert found.finding == "config"
    assert found.first_suspect is not None
    assert found.first_suspect.record == "hyperparameters learning_rate / lr"
    assert diagnose(a).finding == "none"


@pytest.mark.parametrize("kept", ["samples_rank0.jsonl", "step4/rank0/dump.json", "nothing.csv"])
def test_a_directory_in_a_run_is_not_answered_with_the_pack_of_the_run(kept: str, tmp_path: Path) -> None:
    """The directory of all incidents holds NaN, and was called well started; a directory of reports holds nothing that is looked at."""
    run = _output(tmp_path / "run", "base", dump=False)
    incident = run / "incidents" / "step4-nan_inf"
    (incident / kept).parent.mkdir(parents=True)
    (incident / kept).write_text('{"data": {}}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="holds no dump" if kept == "nothing.csv" else "give one of them: .*step4-nan_inf"):
        diagnose(run / "incidents")


def test_a_damaged_pack_does_not_stop_the_rest(tmp_path: Path) -> None:
    """The dumps are compared, and the problem is said."""
    a, b = _output(tmp_path / "a", "planted"), _output(tmp_path / "b", "base")
    (a / "config_check_pack.zip").write_bytes(b"PK broken")
    found = diagnose(a, b)
    assert found.finding == "none"
    assert any("config_check_pack.zip" in problem for problem in found.problems)


def test_two_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finding ``checkpoint`` names the tensor and what differs; equal ones are finding ``none``, and one alone is refused."""
    weights = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "v": np.ones(2, dtype=np.float32)}
    save_file(weights, tmp_path / "a.safetensors")
    weights["w"][1, 2] += 1
    save_file(weights, tmp_path / "b.safetensors")
    a, b = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    assert main(["diagnose", b, a, "-o", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().out.startswith("The checkpoints differ: w")
    data = json.loads((tmp_path / "out" / "diagnosis.json").read_text(encoding="utf-8"))
    assert (data["finding"], data["first_suspect"]["record"]) == ("checkpoint", "w")
    assert "1 of 12 elements differ, by 1 at most" in data["first_suspect"]["why"]
    again = shutil.copy(a, tmp_path / "again.safetensors")
    assert main(["diagnose", a, str(again), "-o", str(tmp_path / "out")]) == 0
    assert main(["diagnose", a, "-o", str(tmp_path / "out")]) == 2


def test_two_things_of_other_kinds(tmp_path: Path) -> None:
    """A pack and a checkpoint are not compared with each other."""
    save_file({"w": np.ones(1, dtype=np.float32)}, tmp_path / "a.safetensors")
    assert main(["diagnose", str(tmp_path / "a.safetensors"), str(PACKS / "base.zip"), "-o", str(tmp_path / "out")]) == 2
