"""What the probe must leave alone under DeepSpeed, and what a step is there."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import deepspeed_harness as harness
import numpy as np
import pytest
import torch
from every_family import EVERY_FAMILY
from forkpool import run_ranks

from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_engine.core.statistics import histograms
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler
from msprobe_integrations.deepspeed.source import DeepSpeedSource

EVERYTHING = replace(EVERY_FAMILY, micro_batch_gradients=True, histograms=("grad_reduced", "update"))
OFFLOAD = {"zero": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}


def trained(stage: int, dtype: str, more: dict[str, Any], monitor: MonitorSettings | None) -> tuple[list[float], dict[str, bytes], bytes]:
    """Losses, weights and the random state after three updates, dropout and clipping included."""
    engine = harness.engine_of(harness.config(stage, dtype, 2, 0.05, **more))
    probe = harness.probe_of(monitor, MemorySink()) if monitor is not None else None
    if probe is not None:
        probe.attach(engine, engine.optimizer)
    losses = []
    for number, x in enumerate(harness.batches(dtype, 6)):
        if probe is not None and number % 2 == 0:
            probe.begin_step(number // 2)
        loss = engine(torch.nn.functional.dropout(x, 0.1))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        if probe is not None and number % 2:
            probe.end_step()
    if probe is not None:
        probe.close()
    names = list(engine.module.named_parameters())
    with harness.deepspeed.zero.GatheredParameters([p for _, p in names], enabled=stage == 3):
        weights = {name: p.detach().clone().view(torch.uint8).numpy().tobytes() for name, p in names}
    return losses, weights, torch.get_rng_state().numpy().tobytes()


@functools.cache
def plain(stage: int, dtype: str, more: str) -> list[Any]:
    """What two ranks have trained without the probe."""
    return run_ranks(2, trained, stage, dtype, json.loads(more), None)


@pytest.mark.framework
@pytest.mark.parametrize(
    ("stage", "dtype", "more"),
    [
        pytest.param(0, "fp32", {}, marks=pytest.mark.slow),
        (0, "bf16", {}),
        (1, "fp16", {}),
        (2, "bf16", {"zero": {"overlap_comm": True}}),
        pytest.param(3, "bf16", {}, marks=pytest.mark.slow),
        (3, "bf16", OFFLOAD),
    ],
)
@pytest.mark.fast_cells("0-bf16-more1")
def test_training_is_bitwise_the_same(stage: int, dtype: str, more: dict[str, Any]) -> None:
    """Losses, weights and random state are the same bits with everything watched as without the probe, and nothing raises."""
    assert plain(stage, dtype, json.dumps(more)) == run_ranks(2, trained, stage, dtype, more, EVERYTHING)


def broken(stage: int, part: str) -> tuple[list[float], dict[str, bytes], bytes]:
    def planted(*_: Any, **__: Any) -> None:
        raise ValueError("planted")

    setattr(DeepSpeedSource if hasattr(DeepSpeedSource, part) else ParameterSampler, part, planted)
    harness.STRICT = False
    return trained(stage, "bf16", {}, EVERYTHING)


@pytest.mark.framework
@pytest.mark.parametrize(("stage", "part"), [(1, "_enter"), (3, "_around"), (2, "gradient"), (0, "after_step"), (3, "_local")])
@pytest.mark.fast_cells("1-_enter")
def test_faults_of_the_probe_stay_in_the_probe(stage: int, part: str) -> None:
    """An exception in any of our parts leaves the training as it is without it."""
    assert run_ranks(2, broken, stage, part) == plain(stage, "bf16", "{}")


def hooks_of(stage: int) -> tuple[list[str], list[str]]:
    engine = harness.engine_of(harness.config(stage, "bf16", 1))
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)

    def state() -> list[str]:
        hooks = [len(p._backward_hooks or {}) for p in engine.module.parameters()]
        owners = [sorted(set(vars(o)) & {"_take_model_step", "step", "buffered_allreduce_fallback"}) for o in (engine, engine.optimizer)]
        zero = "reduce_ready_partitions_and_remove_grads" in vars(engine.optimizer)
        return [str(hooks), str(owners), str(zero), str(len(inner._optimizer_step_pre_hooks)), str(len(inner._optimizer_step_post_hooks))]

    before = state()
    probe = harness.probe_of(EVERYTHING, MemorySink())
    probe.attach(engine, engine.optimizer)
    for number, x in enumerate(harness.batches("bf16", 2)):
        probe.begin_step(number)
        engine.backward(engine(x))
        engine.step()
        probe.end_step()
    assert state() != before
    probe.close()
    return before, state()


@pytest.mark.fast_cells("0")
@pytest.mark.framework
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])  # of 1 and 2 one class takes care
def test_nothing_stays_behind(stage: int) -> None:
    """When the probe is closed, engine, optimizers and parameters have their own methods and hooks again."""
    for before, after in run_ranks(2, hooks_of, stage):
        assert before == after


def overflowing(stage: int) -> list[tuple[set[str], dict[str, float], float]]:
    engine = harness.engine_of(harness.config(stage, "fp16", 1, 0.05))
    sink = MemorySink()
    probe = harness.probe_of(EVERYTHING, sink)
    skipped: list[bool] = []
    probe.attach(engine, engine.optimizer, on_update=skipped.append)
    for number, x in enumerate(harness.batches("fp16", 3)):
        probe.begin_step(number)
        if number == 1 and harness.deepspeed.comm.get_rank() == 1:
            x[0, 0] = float("inf")
        engine.backward(engine(x))
        engine.step()
        probe.end_step()
    probe.close()
    assert skipped == [False, True, False]
    assert engine.skipped_steps == 1
    found = []
    for frame in sink.frames:
        samples = harness.samples_of(frame)
        bad = sum(statistics.nans + statistics.infs for key, (statistics, _) in samples.items() if key[:2] == ("grad_reduced", "reduced"))
        found.append(({f"{k[0]} {k[1]}".strip() for k in samples}, frame.scalars, float(bad)))
    return found


@pytest.mark.framework
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_an_overflow_is_a_step(stage: int) -> None:
    """A skipped update keeps its number, says so, shows the gradients that were not finite, and has no update, on every rank."""
    for first, second, third in run_ranks(2, overflowing, stage):
        assert [frame[1]["skipped"] for frame in (first, second, third)] == [0.0, 1.0, 0.0]
        assert [frame[2] > 0 for frame in (first, second, third)] == [False, True, False]
        assert {"update", "ratio", "grad_reduced clipped"} <= first[0] & third[0]
        assert not {"update", "ratio", "grad_reduced clipped"} & second[0]
        assert {"param_origin", "param_updated", "grad_reduced reduced"} <= second[0]
        assert first[1]["learning_rate"] == 0.01
        assert first[1]["loss_scale"] == 64.0
        assert np.isfinite(first[1]["grad_norm"])
        assert not np.isfinite(second[1]["grad_norm"])


def attached(stage: int, how: str) -> tuple[dict[str, float], list[str]]:
    engine = harness.engine_of(harness.config(stage, "bf16", 1))

    class Wrapper:
        optimizer = engine.optimizer
        param_groups = engine.optimizer.param_groups

    Wrapper.__module__ = "deepspeed.wrapped"  # as launchers derive theirs from the framework's
    objects = {
        "engine": (engine, None),
        "both": (engine, engine.optimizer),
        "optimizer": (engine.module, engine.optimizer),
        "wrapper": (engine.module, Wrapper()),
    }
    sink = MemorySink()
    probe = harness.probe_of(MonitorSettings(gradients=True, optimizer_states=True), sink)
    probe.attach(*objects[how])
    for number, x in enumerate(harness.batches("bf16", 1)):
        probe.begin_step(number)
        engine.backward(engine(x))
        engine.step()
        probe.end_step()
    probe.close()
    (frame,) = sink.frames
    samples = harness.samples_of(frame)
    return {f"{k[0]} {k[2]}": v[0].norm for k, v in samples.items()}, sorted({str(v[1].get("scope")) for v in samples.values()})


@pytest.mark.framework
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.slow
def test_found_by_any_of_its_objects(stage: int) -> None:
    """The engine alone, the optimizer that initialize returned, or a wrapper of it lead to the same statistics of whole parameters."""
    ways = [run_ranks(2, attached, stage, how) for how in ("both", "engine", "optimizer", "wrapper")]
    assert ways[0][0][1] == ["whole"]
    assert len(ways[0][0][0]) == 3 * 7
    for way in ways:
        assert way == [ways[0][0]] * 2


def partly_watched() -> tuple[list[str], int, int]:
    engine = harness.engine_of(harness.config(2, "bf16", 1))
    sink = MemorySink()
    probe = harness.probe_of(MonitorSettings(gradients=True, rank=(0,)), sink)
    probe.attach(engine, engine.optimizer)
    (x,) = harness.batches("bf16", 1)
    probe.begin_step(0)
    engine.backward(engine(x))
    engine.step()
    probe.end_step()
    probe.close()
    samples = [sample for frame in sink.frames for sample in harness.samples_of(frame).values()]
    whole = sum(p.numel() for p in engine.module.parameters())
    return sorted({str(facts["scope"]) for _, facts in samples}), sum(statistics.count for statistics, _ in samples), whole


@pytest.mark.framework
def test_a_rank_alone_says_that_it_has_a_shard() -> None:
    """When `monitor.rank` leaves ranks out, the statistics are marked as those of the shard and count its elements."""
    (scopes, count, whole), (none, nothing, _) = run_ranks(2, partly_watched)
    assert scopes == ["shard"]
    assert 0 < count < whole
    assert (none, nothing) == ([], 0)


def binned(stage: int) -> dict[str, tuple[int, list[int]]]:
    engine = harness.engine_of(harness.config(stage, "fp32", 1))
    sink = MemorySink()
    probe = harness.probe_of(MonitorSettings(gradients=True, updates=True, histograms=("grad_reduced", "update")), sink)
    probe.attach(engine, engine.optimizer)
    (x,) = harness.batches("fp32", 1)
    probe.begin_step(0)
    engine.backward(engine(x))
    engine.step()
    probe.end_step()
    probe.close()
    (frame,) = sink.frames
    found = {}
    for sample in frame.samples:
        if sample.family == "ratio":
            continue  # belongs to the update, and was not asked for
        place = sample.extra["histogram"]
        counts = histograms.counts(frame.rows, place["row"], place["kind"])
        found[f"{sample.family} {sample.phase} {sample.name}"] = (place["bins"], [int(c) for c in counts])
    return found


@pytest.mark.framework
@pytest.mark.slow
def test_histograms_are_of_the_whole() -> None:
    """Histograms of shards are merged: ZeRO 1, 2 and 3 have those of the run without ZeRO."""
    plain = run_ranks(2, binned, 0)[0]
    assert sum(sum(counts) for _, counts in plain.values()) > 100
    for stage in (1, 2, 3):
        for found in run_ranks(2, binned, stage):
            assert found == plain
