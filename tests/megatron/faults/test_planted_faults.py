"""The probe's own incident and `nan_analyze` name what was planted, for one seed after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forkpool import run_ranks
from megatron_harness import capturing, run_with_fault

from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze

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
