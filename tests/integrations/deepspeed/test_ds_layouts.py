"""Layouts of DeepSpeed with parts of the training elsewhere: on the host, in experts, in stages with an evaluation between two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import pytest
import torch
from forkpool import run_ranks
from harness.case import Training, TrainingCase
from harness.frameworks import deepspeed_engine

from msprobe_engine.core.settings.schema import MonitorSettings, ReplicaCheckSettings

pytestmark = pytest.mark.framework
VARIANTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "optimizer offloaded": (2, "bf16", {"zero": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}),
    "parameters offloaded": (
        3,
        "bf16",
        {
            "zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            "zero_force_ds_cpu_optimizer": False,
        },
    ),
    "persistent parameters": (3, "fp16", {"zero": {"stage3_param_persistence_threshold": 20}}),
    "round robin": (1, "fp16", {"zero": {"round_robin_gradients": True}}),
}
MONITOR = MonitorSettings(activations=True, parameters=True, optimizer_states=True, updates=True)


def variant(name: str) -> Any:
    stage, dtype, more = VARIANTS[name]

    def once(sections: dict[str, Any] | None) -> jobs.Run:
        torch.manual_seed(3)
        return jobs.train(harness.config(stage, dtype, 2, 0.05, **more), dtype, 2, sections)

    plain, seen = once(None), once({"monitor": MONITOR})
    families = {s.family for s in seen.frames[0].samples}
    return plain.bits == seen.bits, [f.step for f in seen.frames], families


@pytest.mark.fast_cells("optimizer offloaded")
@pytest.mark.parametrize("name", list(VARIANTS))
def test_variants(name: str) -> None:
    """With parts of the training on the host, parameters that are never partitioned, or another order of gradients: the same bits, and
    the families of a run without."""
    for same, steps, families in run_ranks(2, variant, name):
        assert same
        assert steps == [0, 1]
        assert {"actv", "grad_reduced", "param_origin", "param_updated", "exp_avg", "update"} <= families, families


EXPERTS = MonitorSettings(collectives=True, replica_check=ReplicaCheckSettings(interval=1, gradients=True))


def with_experts() -> Any:
    """In a rank: facts and norms of the gradients of a step, coordinates of the rank, alerts are raised by `strict`."""
    training = Training(TrainingCase("deepspeed_engine", "moe", {"ep": 2}, "bf16"), Path())
    engine = deepspeed_engine.make_engine(training)
    callback = jobs.follow(engine, jobs.settings(monitor=EXPERTS))
    assert callback is not None
    probe = callback.observer.probe
    assert probe is not None
    x = deepspeed_engine.MODELS["moe"].batch(0, 0, training.data_rank()).bfloat16()
    engine.backward(engine(x))
    engine.step()
    callback.close()
    (frame,) = probe.frames
    gradients = [record for record in frame.records() if getattr(record.source, "family", "") == "grad_reduced"]
    found = {record.name: (record.statistics.norm, dict(record.source.extra).get("expert", False)) for record in gradients}
    return found, dict(probe.pipeline.rank_info)


def test_experts() -> None:
    """Experts are marked and differ between ranks, what both ranks share is equal, and a rank knows its coordinate."""
    (first, here), (second, there) = run_ranks(2, with_experts)
    assert (here["ep"], there["ep"]) == (0, 1)
    assert first.keys() == second.keys()
    for name, (norm, expert) in first.items():
        assert expert is ("deepspeed_experts" in name), name
        assert (second[name][0] == norm) is not expert, name


def pipelined(seen: bool) -> Any:
    """In a rank: two steps of a pipeline with an evaluation between them."""
    training = Training(TrainingCase("deepspeed_engine", parallelism={"pp": 2}), Path())
    engine = deepspeed_engine.make_engine(training)
    callback = jobs.follow(engine, jobs.settings(monitor=MONITOR) if seen else None)
    data = lambda step: deepspeed_engine._pairs([deepspeed_engine.SHARED["mlp"].batch(step, micro, 0) for micro in range(2)])  # noqa: E731
    losses = [float(engine.train_batch(data_iter=data(0))), float(engine.eval_batch(data_iter=data(9)))]
    losses.append(float(engine.train_batch(data_iter=data(1))))
    frames: list[Any] = []
    if callback is not None:
        probe = callback.observer.probe
        assert probe is not None
        callback.close()
        frames = [(f.step, f.scalars, sorted({s.micro_step for s in f.samples if s.family == "actv"})) for f in probe.frames]
    return (losses, deepspeed_engine.weights_of(engine)), frames


def test_evaluation_between_steps_of_a_pipeline() -> None:
    """It is not seen: steps have the losses of their own batches and every micro batch once; the training is the same."""
    for (bits, frames), (plain, _) in zip(run_ranks(2, pipelined, True), run_ranks(2, pipelined, False)):
        assert bits == plain
        assert [(step, micro) for step, _, micro in frames] == [(0, [0, 1]), (1, [0, 1])]
        for loss, (_, scalars, _) in zip((bits[0][0], bits[0][2]), frames):
            assert scalars["loss"] == pytest.approx(loss, rel=1e-6)
            assert scalars["learning_rate"] == 0.01
