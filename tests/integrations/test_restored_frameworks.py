"""Detaching from Megatron and DeepSpeed puts back every name of the framework and of torch, by identity."""

from __future__ import annotations

import tempfile

import deepspeed_harness as zero
import pytest
import torch
from forkpool import run_ranks
from restored import snapshot

from msprobe_engine.settings.schema import MonitorSettings, ReplicaCheckSettings

pytestmark = pytest.mark.framework
MONITOR = MonitorSettings(
    gradients=True,
    unreduced_gradients=True,
    parameters=True,
    optimizer_states=True,
    updates=True,
    activations=True,
    activation_gradients=True,
    collectives=True,
    replica_check=ReplicaCheckSettings(interval=2),
)


def engine(stage: int, dtype: str) -> list[str]:
    made = zero.engine_of(zero.config(stage, dtype))

    def update(batch: torch.Tensor) -> None:
        made.backward(made(batch))
        made.step()

    first, *batches = zero.batches(dtype, 4)
    update(first)
    before = snapshot(made.module)
    probe = zero.probe_of(MONITOR, zero.Frames())
    probe.attach(made.module, made.optimizer)
    for step, batch in enumerate(batches):
        probe.begin_step(step)
        update(batch)
        probe.end_step()
    probe.close()
    return before.changed()


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp16"), (2, "bf16"), (3, "fp32")])
def test_zero(stage: int, dtype: str) -> None:
    """DeepSpeed ZeRO 1, 2 and 3."""
    assert run_ranks(2, engine, stage, dtype) == [[], []]


def megatron(argv: str) -> list[str]:
    import megatron_harness as harness
    import train_gpt
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

    from msprobe_integrations.megatron import patches

    a = train_gpt.arguments(["--quiet", "--layers", "1", "--steps", "3", *argv.split()])

    def train() -> None:
        _, chunks, optimizer = train_gpt.build(a)
        train_gpt.train(a, chunks, optimizer)
        parallel_state.destroy_model_parallel()
        destroy_num_microbatches_calculator()

    train()
    before = snapshot()
    with tempfile.TemporaryDirectory() as place:
        observer, _ = harness.observed(harness.probe_settings(MONITOR, level="mix", output=place))
        train()
        observer.close()
        patches.observe(None)
    return before.changed()


@pytest.mark.parametrize("argv", ["", "--distopt", "--tp 2 --sp"])
def test_megatron(argv: str) -> None:
    """Megatron with plain data parallelism, the distributed optimizer, and tensor parallelism."""
    assert run_ranks(2, megatron, argv) == [[], []]
