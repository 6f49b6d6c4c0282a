"""The probe's own incident and `nan_analyze` name what was planted, for one seed after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from forkpool import run_ranks
from megatron_harness import train_gpt

from msprobe_engine.diagnose.nan_analyze import nan_analyze
from msprobe_engine.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.megatron import patches
from msprobe_integrations.megatron.layout import unwrapped
from msprobe_integrations.megatron.observer import TrainingObserver

LAYOUTS = ("--distopt", "", "--tp 2", "--pp 2 --untie")


def job(argv: str, seed: int, output: str) -> dict[str, Any]:
    from fault import plant

    settings = ProbeSettings(
        output_dir=output,
        strict=True,
        log_level="silent",
        monitor=MonitorSettings(gradients=True),
        sinks=SinkSettings(csv=CsvSettings(enabled=False)),
        incident=IncidentSettings(level="mix", ring_steps=3),
    )
    observer = TrainingObserver(settings)
    patches.observe(lambda: observer)
    a = train_gpt.arguments(["--quiet", "--steps", "8", *argv.split()])
    _, chunks, optimizer = train_gpt.build(a)
    now = [0]
    model = unwrapped(chunks[0])
    answer = plant(model, seed, rank=dist.get_rank(), world_size=2, steps=a.steps, step=lambda: now[0], truth=None)
    train_gpt.train(a, chunks, optimizer, on_step=lambda step: now.__setitem__(0, step))
    observer.close()
    return answer


@pytest.mark.framework
@pytest.mark.parametrize("seed", range(20))
def test_the_planted_fault_is_named(seed: int, tmp_path: Path) -> None:
    """Step, rank and module that `nan_analyze` gives for the incident are those of the planted fault."""
    answers = run_ranks(2, job, LAYOUTS[seed % len(LAYOUTS)], seed, str(tmp_path), timeout=90)
    (truth,) = [answer for answer in answers if answer]
    (incident, *_) = sorted((tmp_path / "incidents").glob("step*"))
    result = nan_analyze(incident)
    first = result.findings[0]
    assert (first["step"], first["rank"], first["module"]) == (truth["step"], truth["rank"], truth["module"]), (
        json.dumps(truth) + result.text
    )
