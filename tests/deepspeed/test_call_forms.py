"""The module and the optimizer of an engine in place of the engine; states that are taken before the update."""

from __future__ import annotations

import deepspeed_harness as harness
import numpy as np
import pytest
from forkpool import run_ranks

from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_engine.probe.sinks.memory import MemorySink

pytestmark = pytest.mark.framework
CLIP = 0.01


def clipped() -> None:
    engine = harness.engine_of(harness.config(0, "fp32", clip=CLIP))
    sink = MemorySink()
    probe = harness.probe_of(MonitorSettings(gradient_phases=("reduced", "clipped")), sink)
    probe.attach(engine.module, engine.optimizer)
    for step, batch in enumerate(harness.batches("fp32", 2)):
        probe.begin_step(step)
        engine.backward(engine(batch))
        engine.step()
        probe.end_step()
    probe.close()
    for frame in sink.frames:
        norms = {"reduced": 0.0, "clipped": 0.0}
        for (_, phase, _, _), (statistics, _) in harness.samples_of(frame).items():
            norms[phase] += (statistics.norm or 0.0) ** 2
        assert np.sqrt(norms["clipped"]) == pytest.approx(CLIP, rel=1e-3)
        assert np.sqrt(norms["reduced"]) == pytest.approx(frame.scalars["grad_norm"], rel=1e-5)
        assert norms["reduced"] > 10 * norms["clipped"]


def test_clipping_of_stage_0() -> None:
    """In fp32 without ZeRO the optimizer is an ordinary one of torch, and DeepSpeed clips by a function of its own: gradients have the
    phase that they are in all the same."""
    run_ranks(1, clipped)


def states_before(stage: int) -> None:
    engine = harness.engine_of(harness.config(stage, "fp16"))
    sink = MemorySink()
    probe = harness.probe_of(MonitorSettings(gradients=False, optimizer_states=True, states_when="before"), sink)
    probe.attach(engine.module, engine.optimizer)
    for step, batch in enumerate(harness.batches("fp16", 3)):
        probe.begin_step(step)
        engine.backward(engine(batch * float("inf") if step == 1 else batch))
        engine.step()
        probe.end_step()
    probe.close()
    assert [frame.scalars["skipped"] for frame in sink.frames] == [0, 1, 0]
    norms = [{key: statistics.norm for key, (statistics, _) in harness.samples_of(frame).items()} for frame in sink.frames]
    assert norms[1]
    assert norms[1] == norms[2]


@pytest.mark.fast_cells("0")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_before_a_skipped_update(stage: int) -> None:
    """They are shown although the inner optimizer is not called, and are those that the next update begins with."""
    run_ranks(2, states_before, stage)
