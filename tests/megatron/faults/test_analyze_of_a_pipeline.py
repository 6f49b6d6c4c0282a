"""A real pipeline of two ranks with a planted fault: the analysis names where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forkpool import run_ranks
from megatron_harness import run_with_fault

from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_engine.formats.monitor.alert_order import Moment, analyze, summary


def job(seed: int, output: str) -> dict[str, Any]:
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
    (truth,) = [answer for answer in run_ranks(2, job, seed, str(tmp_path), timeout=240) if answer]
    result = analyze(tmp_path)
    assert result.began is not None
    first = result.began.first
    assert (first.step, first.rank, first.pp_stage) == (truth["step"], truth["rank"], truth["rank"])
    assert result.began.place.moment is Moment.FORWARD
    assert first.name.startswith(f"{truth['module']}.output")
    assert f"step {truth['step']} in the forward pass" in summary(result).splitlines()[0]
    assert {a.rank for a in result.found.anomalies if a.step == truth["step"]} == {0, 1}
