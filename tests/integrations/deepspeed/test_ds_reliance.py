"""A version of DeepSpeed that lacks one attribute of the table: the training is bitwise the same, what is lost is said by name, and no
number is another one than with all of them."""

from __future__ import annotations

import math
import sys
from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import pytest
import torch
from forkpool import run_ranks
from harness import renames
from log_lines import heard

from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import MonitorSettings, ReplicaCheckSettings
from msprobe_integrations import requirements
from msprobe_integrations.deepspeed import reliance
from msprobe_integrations.deepspeed.callback import DeepSpeedCallback

pytestmark = pytest.mark.framework
FULL = MonitorSettings(
    activations=True,
    gradients=True,
    unreduced_gradients=True,
    micro_batch_gradients=True,
    parameters=True,
    optimizer_states=True,
    updates=True,
    replica_check=ReplicaCheckSettings(interval=1),
)
KINDS = {0: "unfused", 1: "zero12", 2: "zero12", 3: "zero3"}
OF_OTHERS = {"forward", "backward", "step", "module", "optimizer", "initialize", "loss_scale", "dp_process_group", "offload_optimizer"}
"""Names that torch or the user's own loop uses, or that are names of arguments and fields as well: without them DeepSpeed does not run."""


def train(stage: int, seen: bool) -> Any:
    harness.STRICT = False
    torch.manual_seed(0)
    net = harness.Net()
    conf = harness.config(stage, "bf16", 2, 0.05)
    engine, *_ = harness.deepspeed.initialize(model=net, model_parameters=net.parameters(), config=conf)
    callback = DeepSpeedCallback(jobs.settings(strict=False, monitor=FULL)) if seen else None
    if callback is not None:
        callback.on_setup(engine)
    losses = []
    for x in harness.batches("bf16", 4):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    frames: list[Frame] = []
    if callback is not None:
        probe = callback.observer.probe
        callback.close()
        frames = [] if probe is None else list(probe.frames)
    names = list(net.named_parameters())
    with harness.deepspeed.zero.GatheredParameters([p for _, p in names], enabled=stage == 3):
        weights = {name: p.detach().clone().view(torch.uint8).numpy().tobytes() for name, p in names}
    return (losses, weights), frames


def numbers(frames: list[Frame]) -> dict[Any, Any]:
    """What was seen of each tensor, where it lies, and all scalars but the times."""
    found: dict[Any, Any] = {}
    for frame in frames:
        for one in frame.samples:
            key = (frame.step, one.family, one.name, one.phase, one.micro_step, str(one.extra.get("state")))
            row = None if one.ref.row < 0 else frame.rows[one.ref.row].tobytes()
            found[key] = (row, one.ref.description.shape, str(one.extra.get("shard")))
        found |= {(frame.step, name): value for name, value in frame.scalars.items() if "second" not in name}
    return found


def is_same(value: Any, right: Any) -> bool:
    """Bits of tensors; a norm may be the probe's own sum where DeepSpeed's has gone, which float32 rounds otherwise."""
    return bool(value == right or (isinstance(value, float) and isinstance(right, float) and math.isclose(value, right, rel_tol=1e-6)))


def rows(stage: int, every: bool) -> list[str]:
    """What a training in this stage relies on. What stages share is tried in one of them, or in all."""
    shared = [row.on for row in reliance.MODULE_TABLE if ":DeepSpeedEngine." in row.on] + [row.on for row in reliance.ENGINE_TABLE]
    shared = shared if every else shared[stage :: len(KINDS)]
    own = [row.on for row in (*(reliance.PARAMETER_TABLE if stage == 3 else ()), *reliance.KIND_TABLES[KINDS[stage]])]
    own = own if every or stage < 2 else own[::3]  # stages 1 and 2 have the same table, and stage 3 much of it
    return [on for on in (*shared, *own) if on.rpartition(".")[2] not in OF_OTHERS]


def drifted(stage: int, every: bool) -> Any:
    harness.deepspeed.init_distributed("gloo", verbose=False)
    lines = heard()
    found, (plain, _) = {}, train(stage, False)
    right = numbers(train(stage, True)[1])
    assert len(right) > 50
    for on in rows(stage, every):
        name = on.rpartition(".")[2]
        lines.clear()
        requirements.MISSING.clear()
        renames.rename(name, f"{name}_of_another_version")
        try:
            bits, frames = train(stage, True)
            said = [line for line in lines if name in line]
            wrong = [(key, value, right.get(key)) for key, value in numbers(frames).items() if not is_same(value, right.get(key))]
            found[on] = (bits == plain, [frame.step for frame in frames], bool(said), wrong[:3], list(lines))
        finally:
            renames.rename(f"{name}_of_another_version", name)
    return found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions are as of Python 3.11")
@pytest.mark.parametrize(("stage", "every"), [(1, False), *(pytest.param(stage, True, marks=pytest.mark.slow) for stage in range(4))])
@pytest.mark.slow
def test_another_version(stage: int, every: bool) -> None:
    """Each attribute of the table in turn has another name: the training is the same, bit for bit, the steps are there, a line names the
    attribute and what is lost, and what is there is what it is with all names."""
    renames.functions("deepspeed")  # once, before children are forked
    for found in run_ranks(2 if stage > 1 else 1, drifted, stage, every, timeout=250):
        assert set(found) == set(rows(stage, every))
        for on, (same, frames, said, wrong, lines) in found.items():
            assert same, (on, lines)
            assert said, (on, lines)
            assert not wrong or on == "engine.global_steps", (on, wrong)
            assert not [line for line in lines if "switched off" in line or "Error" in line], (on, lines)
            if on != "engine.global_steps":
                assert frames == [0, 1], (on, lines)


class Bare:
    """An optimizer of some kind, without one of its tables."""

    def __init__(self, kind: str, without: str) -> None:
        for row in reliance.KIND_TABLES[kind]:
            name = row.on.rpartition(".")[2]
            if name != without:
                setattr(self, name, None)


@pytest.mark.parametrize("kind", list(reliance.KIND_TABLES))
def test_a_table_that_is_needed_is_missing(kind: str) -> None:
    """Without one of its tables the parameter side of an optimizer is off, or goes on without what the row says; both are said by name."""
    assert reliance.usable(kind, Bare(kind, ""))
    for row in reliance.KIND_TABLES[kind]:
        name = row.on.rpartition(".")[2]
        requirements.MISSING.clear()
        lost = requirements.find_missing(reliance.KIND_TABLES[kind], {kind: Bare(kind, name)})
        assert lost == [row]
        assert reliance.usable(kind, Bare(kind, name)) is (row.on not in reliance.NEEDED), name


class OfTheFuture:
    """An optimizer that keeps nothing where it was."""


def test_an_optimizer_of_an_unknown_kind() -> None:
    """DeepSpeed's own optimizer without any known table has no parameter side; a client's optimizer is none of DeepSpeed's."""
    OfTheFuture.__module__ = "deepspeed.runtime.zero.stage_4"
    assert reliance.unknown(OfTheFuture())
    assert not reliance.unknown(torch.optim.SGD([torch.zeros(1)], lr=1.0))
