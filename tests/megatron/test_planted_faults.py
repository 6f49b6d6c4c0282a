"""A planted fault in a real pipeline: the analysis of the monitor, and `nan_analyze` of the probe's own incident, name where it was, for
one seed after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forkpool import run_ranks
from megatron_harness import capturing, run_with_fault

from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.formats.monitor.alert_order import Moment, analyze, summary

LAYOUTS = ("--distopt", "", "--tp 2", "--pp 2 --untie")


def job(argv: str, seed: int, output: str) -> dict[str, Any]:
    return run_with_fault(argv, seed, capturing(output), steps=6)


@pytest.mark.fast_cells("0")
@pytest.mark.framework
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.slow
def test_the_planted_fault_is_named(seed: int, tmp_path: Path) -> None:
    """Step, rank and module that `nan_analyze` gives for the incident are those of the planted fault."""
    answers = run_ranks(2, job, LAYOUTS[seed % len(LAYOUTS)], seed, str(tmp_path), timeout=240)
    (truth,) = [answer for answer in answers if answer]
    (incident, *_) = sorted((tmp_path / "incidents").glob("step*"))
    result = nan_analyze(incident)
    first = result.findings[0]
    assert (first["step"], first["rank"], first["module"]) == (truth["step"], truth["rank"], truth["module"]), (
        json.dumps(truth) + result.text
    )


def monitored(seed: int, output: str) -> dict[str, Any]:
    settings = ProbeSettings(
        output_dir=output,
        strict=True,
        log_level="silent",
        monitor=MonitorSettings(activations=True, activation_gradients=True, gradients=True, parameters=True),
        sinks=SinkSettings(csv=CsvSettings(path=f"{output}/monitor")),
        incident=IncidentSettings(enabled=False),
    )
    return run_with_fault("--pp 2 --untie", seed, settings, steps=8)


@pytest.mark.framework
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_planted_fault_comes_first(seed: int, tmp_path: Path) -> None:
    """Step, rank, module and direction of the first alert in the order of execution are those of the planted fault, although the other
    stage of the pipeline reports NaN in the same step, too."""
    (truth,) = [answer for answer in run_ranks(2, monitored, seed, str(tmp_path), timeout=240) if answer]
    result = analyze(tmp_path)
    assert result.began is not None
    first = result.began.first
    assert (first.step, first.rank, first.pp_stage) == (truth["step"], truth["rank"], truth["rank"])
    assert result.began.place.moment is Moment.FORWARD
    assert first.name.startswith(f"{truth['module']}.output")
    assert f"step {truth['step']} in the forward pass" in summary(result).splitlines()[0]
    assert {a.rank for a in result.found.anomalies if a.step == truth["step"]} == {0, 1}
