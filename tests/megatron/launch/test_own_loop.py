"""A Megatron training in a loop of its own, without launcher and observer: numbers of the step, shapes of states."""

from __future__ import annotations

from typing import Any

import pytest
import train_gpt
from forkpool import run_ranks
from megatron_harness import probe_settings

from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
MONITOR = MonitorSettings(optimizer_states=True, updates=True)
STEPS = 3


def job(argv: str) -> dict[str, Any]:
    a = train_gpt.arguments(["--quiet", "--steps", str(STEPS), *argv.split()])
    _, chunks, optimizer = train_gpt.build(a)
    sink = MemorySink()
    probe = TorchProbe(probe_settings(MONITOR), extra_sinks=[sink])

    def ended(_skipped: bool) -> None:
        probe.end_step()
        probe.begin_step(len(norms))

    probe.attach(chunks, optimizer, on_update=ended)
    norms: list[float | None] = []
    scales: list[float] = []
    inner = optimizer.step

    def step() -> Any:
        scales.append(float(optimizer.get_loss_scale()))
        norms.append(None)
        result = inner()
        norms[-1] = None if result[1] is None else float(result[1])
        return result

    optimizer.step = step
    probe.begin_step(0)
    train_gpt.train(a, chunks, optimizer)
    probe.close()
    shapes = {name.removeprefix("module."): tuple(p.shape) for chunk in chunks for name, p in chunk.named_parameters()}
    seen = {
        (record.source.family, record.name): record.source.ref.description.shape
        for frame in sink.frames
        for record in frame.records()
        if record.source.family in ("exp_avg", "exp_avg_sq", "update", "ratio")
    }
    return {"norms": norms, "scales": scales, "scalars": [f.scalars for f in sink.frames][:STEPS], "shapes": shapes, "seen": seen}


@pytest.mark.fast_cells("--tp 2 --fp16")
@pytest.mark.parametrize("argv", ["--tp 2 --fp16", "--pp 2 --nmb 2", "--ep 2 --experts 4 --distopt"])
def test_numbers_of_the_step_and_shapes(argv: str) -> None:
    """The gradient norm is Megatron's own, over all ranks of the model, the loss scale its scaler's; states of whole parameters, which
    the distributed optimizer keeps flat, have the parameter's shape."""
    for rank in run_ranks(2, job, argv):
        for scalars, norm, scale in zip(rank["scalars"], rank["norms"], rank["scales"], strict=True):
            if norm is not None:
                assert scalars["grad_norm"] == pytest.approx(norm, rel=1e-6)
            assert scalars.get("loss_scale", 1.0) == scale
            assert scalars["learning_rate"] == 0.01
        assert rank["seen"]
        for (_, name), shape in rank["seen"].items():
            assert shape in [s for other, s in rank["shapes"].items() if other.endswith(name)], name
