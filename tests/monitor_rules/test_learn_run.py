"""Learning from a healthy run, end to end: quiet on another healthy run, not on a faulty one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rule_trainings import Gpt, Step, train

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.schema import MonitorSettings, RuleSettings
from msprobe_engine.probe.rules.bands import load_bands

STEPS = 120
MONITOR = MonitorSettings(gradients=True, parameters=True)


def run(place: Path, seed: int, **how: Any) -> Any:
    torch.manual_seed(seed)
    how.setdefault("rules", ())
    return train(place, STEPS, model=Gpt(1), seed=seed, monitor=MONITOR, **how)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Output of a healthy run, and the bands of it."""
    place = tmp_path_factory.mktemp("learn")
    run(place / "good", 0, csv=True)
    bands = place / "bands.json"
    assert main(["monitor", "learn", str(place / "good"), "-o", str(bands)]) == 0
    return place / "good", bands


def test_what_is_learned(learned: tuple[Path, Path]) -> None:
    """Every tensor and number has its band, and the relations of the run hold."""
    bands = load_bands(learned[1])
    names = list(dict(Gpt(1).named_parameters()))
    assert {"loss", "grad_norm"} <= set(bands.scalars)
    assert len(bands.samples["grad_reduced"]["norm"]) == len(bands.samples["param_updated"]["norm"]) == len(names)
    assert set(bands.changing) == {f"0 {name}" for name in names}
    assert bands.finite
    assert not bands.scale


@pytest.mark.slow
def test_check_counts_false_alarms(learned: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a second healthy run there are none; on one with a fault they are counted, named, and the exit code says so."""
    good, bands = learned
    run(tmp_path / "good2", 1, csv=True)
    assert main(["monitor", "learn", str(good), "-o", str(tmp_path / "b.json"), "--check", str(tmp_path / "good2")]) == 0
    out, err = capsys.readouterr()
    assert " 0 false alarms" in out
    assert "healthy" not in err
    assert json.loads((tmp_path / "b.json").read_text())["scalars"] == json.loads(bands.read_text())["scalars"]

    def fault(step: Step) -> None:
        if step.number >= 60:
            step.model.layers[0].fc1.weight.grad.mul_(100.0)

    run(tmp_path / "bad", 1, csv=True, until=70, after_backward=fault)
    assert main(["monitor", "learn", str(good), "-o", str(tmp_path / "b.json"), "--check", str(tmp_path / "bad")]) == 1
    assert "grad_reduced norm layers.0.fc1.weight (reduced): steps 62" in capsys.readouterr().out


def test_a_run_with_alerts_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who learns from a run in which a rule fired is asked whether it is healthy; ends of lasting alerts are not counted. It is learned."""

    def fault(step: Step) -> None:
        if step.number == 60:
            step.model.layers[0].fc1.weight.grad.mul_(1000.0)

    run(tmp_path / "bad", 1, csv=True, until=65, rules=(RuleSettings(rule="exploding_gradient"),), after_backward=fault)
    assert main(["monitor", "learn", str(tmp_path / "bad"), "-o", str(tmp_path / "b.json")]) == 0
    assert re.search(rf"{tmp_path}/bad: \d+ alerts? in this run: is it healthy\?", capsys.readouterr().err)


@pytest.mark.slow
def test_the_rule_is_quiet_and_catches(learned: tuple[Path, Path], tmp_path: Path) -> None:
    """Live, with another seed, the rule says nothing; a gradient out of its band is said after `patience` steps, a parameter that stays
    after three."""
    rules = (RuleSettings(rule="learned", args={"file": str(learned[1])}),)
    assert [a.message for a in run(tmp_path, 2, rules=rules).alerts] == []

    def fault(step: Step) -> None:
        if step.number >= 60:
            step.model.layers[0].fc1.weight.grad.mul_(100.0)
            step.model.head.bias.grad = None

    alerts = run(tmp_path, 2, rules=rules, until=66, after_backward=fault).alerts
    first = {a.name: (a.step, a.extra.get("op", "")) for a in reversed(alerts)}
    assert first["layers.0.fc1.weight"] == (62, "norm")
    assert first["head.bias"] == (62, "")


def test_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to read, or too little, is one clean line and exit code 2."""
    assert main(["monitor", "learn", str(tmp_path), "-o", str(tmp_path / "b.json")]) == 2
    assert "no monitor has written here" in capsys.readouterr().err
    assert main(["monitor", "learn", str(tmp_path), "-o", str(tmp_path / "no" / "b.json")]) == 2
    assert "is not there" in capsys.readouterr().err
