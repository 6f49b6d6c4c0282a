"""Ranks that hold the same parameters and come to different ones: found in one run, of dumps and of monitor output; parts are no copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import warm
from written_monitor import PARAMETERS, Monitor

from msprobe_engine.cli.main import main
from msprobe_engine.find.run import diagnose

TRAINING = Path(__file__).parent / "two_ranks.py"


def train(tmp_path: Path, kind: str) -> Path:
    """Output directory of a training on two gloo ranks; rank 1 updates with ten times the learning rate where `kind` has "rate"."""
    for done in warm.ranks(2, TRAINING.read_text(), tmp_path / "out", kind, timeout=300):
        assert done.returncode == 0, done.stderr[-3000:]
    return tmp_path / "out"


@pytest.mark.fast_cells("dump")
@pytest.mark.parametrize("output", ["monitor", "dump"])
def test_replicas_that_part(tmp_path: Path, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Data parallel ranks with another learning rate each: all parameters part at the first update, and no layer is left that agrees."""
    out = train(tmp_path, f"ddp-rate-{output}")
    assert main(["diagnose", str(out), "-o", str(tmp_path / "page")]) == 1
    text = capsys.readouterr().out
    first = diagnose(out).first_suspect
    assert first is not None
    assert (first.kind, first.rank) == ("desync", 1)
    assert first.step == (0 if output == "monitor" else 1)  # a dump has the parameters as the next forward pass takes them
    assert "Ranks that must hold the same values do not" in text.splitlines()[0]
    assert "optimizer.lr is 0.01" in text or output == "dump"


@pytest.mark.fast_cells("ddp-dump")
@pytest.mark.parametrize("kind", ["ddp-monitor", "ddp-dump", "experts-monitor", "experts-dump"])
def test_nobody_is_accused(tmp_path: Path, kind: str) -> None:
    """Replicas that agree; and modules of two ranks with the same names and first numbers that have gradients of their own."""
    found = diagnose(train(tmp_path, kind))
    assert found.finding == "none"
    assert ("no parameter whose statistics differ" in found.nothing) == kind.startswith("ddp")
    assert any("Replicas were not compared" in line for line in found.evidence) == kind.startswith("experts")
    assert any("differ from step" in problem for problem in found.problems) == kind.startswith("experts")


def test_ranks_that_were_given_the_same_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data-parallel ranks sum the gradients of all their parameters: with the same rows on all of them each step is that of one rank."""
    out = train(tmp_path, "ddp-same-dump")
    assert main(["diagnose", str(out), "-o", str(tmp_path / "page")]) == 1
    assert "Ranks that must share the data do not" in capsys.readouterr().out.splitlines()[0]
    first = diagnose(out).first_suspect
    assert first is not None
    assert (first.kind, first.step, first.ranks) == ("data", 0, [0, 1])


@pytest.mark.fast_cells("sums-seeds-dump-Functional.dropout.0.forward")
@pytest.mark.parametrize(("kind", "record"), [("sums-seeds-dump", "Functional.dropout.0.forward"), ("sums-dump", None)])
def test_random_numbers_that_part_copies(tmp_path: Path, kind: str, record: str | None) -> None:
    """What ranks have summed up is the same on each of them; a dropout that makes other tensors of it is named."""
    first = diagnose(train(tmp_path, kind)).first_suspect
    assert (first and first.record) == record


@pytest.mark.slow
def test_a_rank_that_was_started_otherwise_is_a_finding(tmp_path: Path) -> None:
    """Shards say nothing about each other, and their ranks were started with another learning rate: that is the finding."""
    found = diagnose(train(tmp_path, "fsdp-rate-monitor"))
    assert (found.finding, found.first_suspect and found.first_suspect.rank) == ("config", 1)
    assert any("config_check --ranks" in command for command in found.next)


def parted(root: Path, places: dict[int, dict[str, Any]], gradient: str = "2.5") -> Path:
    """Monitor output in which every parameter of rank 1 is another one from step 1 on."""
    run = Monitor(root)
    run.places = places
    for name in PARAMETERS:
        for step in (1, 2):
            run.put(1, step, "param_updated", name, "9")
        run.put(1, 1, "grad_reduced", name, gradient)
        run.put(0, 1, "grad_reduced", name, "2.5")
    run.put(1, 2, "param_origin", PARAMETERS[0], "9")
    return run.write()


@pytest.mark.parametrize(
    ("places", "gradient", "finding"),
    [
        ({0: {}, 1: {}}, "2.5", "desync"),
        ({0: {"dp": 0, "tp": 0}, 1: {"dp": 1, "tp": 0}}, "2.5", "desync"),
        ({0: {"tp": 0}, 1: {"tp": 1}}, "2.5", "none"),
        ({0: {"pp": 0}, 1: {"pp": 1}}, "2.5", "none"),
        ({0: {"ep": 0}, 1: {"ep": 1}}, "2.5", "none"),
        ({0: {"tp": 0}, 1: {"tp": 1}}, "2.25", "none"),
    ],
)
def test_who_holds_copies(tmp_path: Path, places: dict[int, dict[str, Any]], gradient: str, finding: str) -> None:
    """One parameter, one gradient and two results are wrong of ranks at the same place of the model, and of no others."""
    found = diagnose(parted(tmp_path / "run", places, gradient))
    assert found.finding == finding
    assert any("Replicas were not compared" in line for line in found.evidence) == (finding == "none")
    if finding == "desync":
        assert found.first_suspect is not None
        assert (found.first_suspect.step, found.first_suspect.rank, found.first_suspect.record) == (1, 1, PARAMETERS[0])


@pytest.mark.parametrize(
    ("checks", "compared"),
    [
        ({0: {"interval": 2, "parameters": True}, 1: {"interval": 2, "parameters": True}}, True),
        ({0: {"interval": 2, "parameters": False, "gradients": True}, 1: {"interval": 2, "parameters": False, "gradients": True}}, True),
        ({0: {"interval": 0, "parameters": True}, 1: {"interval": 0, "parameters": True}}, False),
        ({0: {"interval": 2, "parameters": True}, 1: {"interval": 0, "parameters": True}}, False),
        ({0: {"interval": 2, "parameters": True}}, False),
        ({0: {"interval": 2, "parameters": False, "gradients": False}, 1: {"interval": 2, "parameters": False, "gradients": False}}, False),
    ],
)
def test_a_check_that_was_off_compared_nothing(tmp_path: Path, checks: dict[int, dict[str, Any]], compared: bool) -> None:
    """The settings of the run have the interval of the check of copies where it was off, too: 0."""
    run = Monitor(tmp_path / "run")
    run.places = {0: {"ep": 0}, 1: {"ep": 1}}
    run.replica_check = checks
    evidence = diagnose(run.write()).evidence
    assert any("Replicas were not compared" in line for line in evidence) != compared
    assert any("every 2 steps and raised no alert" in line for line in evidence) == compared
