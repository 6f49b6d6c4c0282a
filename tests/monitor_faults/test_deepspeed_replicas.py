"""Replica check under DeepSpeed: silent under every stage, and what differs is named where there are copies."""

from __future__ import annotations

import deepspeed_harness as ds
import pytest
import torch.distributed as dist
from forkpool import run_ranks
from replica_cases import Ears, Said, flip_a_bit

from msprobe_engine.core.settings.schema import MonitorSettings, ReplicaCheckSettings

pytestmark = pytest.mark.framework
MONITOR = MonitorSettings(gradients=False, replica_check=ReplicaCheckSettings(interval=2, gradients=True))


def train(stage: int, dtype: str, fault: bool) -> list[Said]:
    engine = ds.engine_of(ds.config(stage, dtype))
    ears = Ears()
    probe = ds.probe_of(MONITOR, ears)  # type: ignore[arg-type]
    probe.attach(engine, engine.optimizer)
    for step, batch in enumerate(ds.batches(dtype, 7)):
        if fault and step == 3 and dist.get_rank() == 1:
            flip_a_bit(engine.module.b.weight.data, 18)
        probe.begin_step(step)
        engine.backward(engine(batch))
        engine.step()
        probe.end_step()
        dist.barrier()
    probe.close()
    return ears.said()


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32")])
def test_copies_are_equal(stage: int, dtype: str) -> None:
    """Parameters and gradients that DeepSpeed keeps alike are alike; where it has none (ZeRO 3) there is nothing to say."""
    assert run_ranks(2, train, stage, dtype, False, timeout=240) == [[], []]


def test_flipped_bit() -> None:
    """Without ZeRO the bit stays: the next check names it on the lowest rank."""
    first, second = run_ranks(2, train, 0, "fp32", True, timeout=240)
    assert second == []
    assert ("param", "b.weight", "dp", (0, 1)) in [(said.kind, said.name, said.group, said.ranks) for said in first if said.step == 4]
