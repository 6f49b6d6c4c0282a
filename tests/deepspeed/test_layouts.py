"""Replicas, experts and pipeline stages of DeepSpeed."""

from __future__ import annotations

from typing import Any

import deepspeed_harness as harness
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from forkpool import run_ranks
from torch import nn

from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.torch.parameters.find import find_source

MONITOR = MonitorSettings(gradients=True, gradient_phases=("reduced", "unscaled"), unreduced_gradients=True, optimizer_states=True)


def labels(probe: Any, engine: Any) -> dict[str, list[tuple[str, bool]]]:
    source = find_source(probe, [engine], engine.optimizer)
    assert source is not None
    return {piece.name: [(r.label, r.part) for r in source.find_replicas(piece)] for piece in source.pieces}


def copies(stage: int) -> dict[str, list[tuple[str, bool]]]:
    engine = harness.engine_of(harness.config(stage, "bf16", 1))
    probe = harness.probe_of(MONITOR, MemorySink())
    found = labels(probe, engine)
    probe.close()
    return found


@pytest.mark.framework
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_copies_of_parameters(stage: int) -> None:
    """Up to ZeRO 2 every data-parallel rank holds the same whole parameter, under ZeRO 3 nobody holds what another one does."""
    for found in run_ranks(2, copies, stage):
        assert len(found) == 7
        assert set(map(str, found.values())) == {str([] if stage == 3 else [("dp", False)])}


class Mixed(nn.Module):
    """A dense layer and a mixture of experts."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.moe = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=ep, k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, extra, _ = self.moe(self.dense(x))
        return (y - x).float().pow(2).mean() + 0.01 * extra.float()


def experts(ep: int) -> tuple[dict[str, list[tuple[str, bool]]], dict[str, tuple[int, str]]]:
    harness.deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = Mixed(ep)
    groups = split_params_into_different_moe_groups_for_optimizer([{"params": list(net.parameters()), "name": "all", "lr": 1e-2}])
    engine, *_ = harness.deepspeed.initialize(model=net, model_parameters=groups, config=harness.config(1, "bf16", 1))
    sink = MemorySink()
    probe = harness.probe_of(MONITOR, sink)
    found = labels(probe, engine)
    probe.attach(engine, engine.optimizer)
    for step in range(2):
        probe.begin_step(step)
        loss = engine(torch.randn(8, 8, dtype=torch.bfloat16))
        engine.backward(loss)
        engine.step()
        probe.end_step()
    probe.close()
    samples = harness.samples_of(sink.frames[-1])
    return found, {k[2]: (v[0].count, str(v[1].get("scope"))) for k, v in samples.items() if k[:2] == ("grad_reduced", "unscaled")}


@pytest.mark.framework
@pytest.mark.parametrize("ep", [1, 2])
def test_experts(ep: int) -> None:
    """Experts have a data-parallel group of their own: their parts merge there, and their copies are there. Every parameter, expert or
    not, is reported whole although the optimizer updates two groups one after the other."""
    for found, counts in run_ranks(2, experts, ep):
        expert = [name for name in found if "deepspeed_experts" in name]
        assert len(expert) == 2 * (2 // ep)
        for name, groups in found.items():
            assert groups == ([("dp", False)] if name not in expert else [("expert_dp", False)] if ep == 1 else []), name
        assert set(counts) == set(found)
        assert counts["dense.weight"] == (64, "whole")
        assert {counts[name] for name in expert} == {(64, "whole" if ep == 1 else "None"), (8, "whole" if ep == 1 else "None")}


class Table(nn.Embedding):
    """The tied embedding; its second use is the output layer."""


def project(table: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ table.weight.T


def pipeline() -> tuple[dict[str, list[tuple[str, bool]]], list[dict[str, float]], dict[str, int]]:
    harness.deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("table", Table, 16, 8),
        LayerSpec(nn.Linear, 8, 8),
        LayerSpec(nn.Linear, 8, 8),
        TiedLayerSpec("table", Table, 16, 8, forward_fn=project),
    ]
    net = PipelineModule(layers, num_stages=2, loss_fn=lambda y, t: nn.functional.cross_entropy(y.view(-1, 16), t.view(-1)))
    conf = harness.config(0, "fp32", 2)
    engine, *_ = harness.deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=conf)
    sink = MemorySink()
    probe = harness.probe_of(MONITOR, sink)
    found = labels(probe, engine)
    probe.attach(engine, engine.optimizer)
    generator = torch.Generator().manual_seed(0)

    def batches() -> Any:
        while True:
            x = torch.randint(0, 16, (4, 3), generator=generator)
            yield x, x

    data = batches()
    for step in range(2):
        probe.begin_step(step)
        loss = engine.train_batch(data_iter=data)
        probe.end_step({"loss": loss})
    probe.close()
    samples = harness.samples_of(sink.frames[-1])
    families: dict[str, int] = {}
    for family, phase, _, _ in samples:
        families[f"{family} {phase}".strip()] = families.get(f"{family} {phase}".strip(), 0) + 1
    return found, [frame.scalars for frame in sink.frames], families


@pytest.mark.framework
def test_pipeline_engine() -> None:
    """`train_batch` is a step; the tied weights are known to be the same on both stages."""
    for found, scalars, families in run_ranks(2, pipeline):
        tied = [name for name, groups in found.items() if groups == [("embedding", False)]]
        assert len(tied) == 1
        assert len(scalars) == 2
        assert all(frame["skipped"] == 0.0 for frame in scalars)
        number = len(found)
        assert families["grad_reduced reduced"] == families["grad_reduced unscaled"] == families["exp_avg"] == number
        assert families["grad_unreduced accumulated"] == number
