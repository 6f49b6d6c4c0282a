"""A real pipeline of two ranks with a planted fault: the analysis names where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from forkpool import run_ranks
from megatron_harness import train_gpt

from msprobe_engine.monitor.analyze import Moment, analyze, summary
from msprobe_engine.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.megatron import patches
from msprobe_integrations.megatron.layout import unwrapped
from msprobe_integrations.megatron.observer import TrainingObserver


def job(seed: int, output: str) -> dict[str, Any]:
    from fault import plant

    settings = ProbeSettings(
        output_dir=output,
        strict=True,
        log_level="silent",
        monitor=MonitorSettings(activations=True, activation_gradients=True, gradients=True, parameters=True),
        sinks=SinkSettings(csv=CsvSettings(path=f"{output}/monitor")),
        incident=IncidentSettings(enabled=False),
    )
    observer = TrainingObserver(settings)
    patches.observe(lambda: observer)
    a = train_gpt.arguments(["--quiet", "--steps", "8", "--pp", "2", "--untie"])
    _, chunks, optimizer = train_gpt.build(a)
    now = [0]
    model = unwrapped(chunks[0])
    answer = plant(model, seed, rank=dist.get_rank(), world_size=2, steps=a.steps, step=lambda: now[0], truth=None)
    train_gpt.train(a, chunks, optimizer, on_step=lambda step: now.__setitem__(0, step))
    observer.close()
    return answer


@pytest.mark.framework
@pytest.mark.parametrize("seed", [0, 1])
def test_the_planted_fault_comes_first(seed: int, tmp_path: Path) -> None:
    """Step, rank, module and direction of the first alert in the order of execution are those of the planted fault, although the other
    stage of the pipeline reports NaN in the same step, too."""
    (truth,) = [answer for answer in run_ranks(2, job, seed, str(tmp_path), timeout=90) if answer]
    result = analyze(tmp_path)
    assert result.began is not None
    first = result.began.first
    assert (first.step, first.rank, first.pp_stage) == (truth["step"], truth["rank"], truth["rank"])
    assert result.began.place.moment is Moment.FORWARD
    assert first.name.startswith(f"{truth['module']}.output")
    assert f"step {truth['step']} in the forward pass" in summary(result).splitlines()[0]
    assert {a.rank for a in result.found.anomalies if a.step == truth["step"]} == {0, 1}
