"""Mixture of experts over two ranks: experts are other parameters on every rank, everything else is one parameter on both."""

from __future__ import annotations

from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
from forkpool import run_ranks
from torch import nn

from msprobe_engine.settings.schema import MonitorSettings, ReplicaCheckSettings

pytestmark = pytest.mark.framework
LAYOUT = "EP 2 (MoE), ZeRO 1, 2 ranks"
SIZE = 12
MONITOR = MonitorSettings(
    activations=True,
    parameters=True,
    optimizer_states=True,
    collectives=True,
    replica_check=ReplicaCheckSettings(interval=1, gradients=True),
)


class Net(nn.Module):
    def __init__(self, experts: int = 2, ranks: int = 2) -> None:
        super().__init__()
        self.i = nn.Linear(SIZE, SIZE)
        self.moe = MoE(SIZE, nn.Linear(SIZE, SIZE), num_experts=experts, ep_size=ranks, k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, auxiliary, _ = self.moe(self.i(x))
        return (y - x).pow(2).mean() + 0.01 * auxiliary


def train(sections: dict[str, Any] | None) -> Any:
    if not harness.deepspeed.comm.is_initialized():
        harness.deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = Net()
    groups = split([{"params": list(net.parameters()), "name": "all", "lr": 1e-2}])
    engine, *_ = harness.deepspeed.initialize(model=net, model_parameters=groups, config=harness.config(1, "bf16"))
    callback = jobs.follow(engine, None if sections is None else jobs.settings(**sections))
    probe = callback.observer.probe if callback is not None else None
    rank = harness.deepspeed.comm.get_rank()
    generator = torch.Generator().manual_seed(rank)
    losses, gradients = [], {}
    for step in range(2):
        loss = engine(torch.randn(8, SIZE, generator=generator).bfloat16())
        engine.backward(loss)
        if step == 0 and callback is None:
            gradients = {n: float(g.norm()) for n, p in net.named_parameters() if (g := safe(p)) is not None}
        engine.step()
        losses.append(float(loss.detach()))
    if callback is not None:
        callback.close()
    weights = {n: p.detach().float().numpy().tobytes() for n, p in net.named_parameters()}
    where = dict(probe.pipeline.rank_info) if probe is not None else {}
    return losses, weights, gradients, [] if probe is None else probe.frames, where


def safe(parameter: torch.Tensor) -> torch.Tensor | None:
    """DeepSpeed's own gathered gradient."""
    found: torch.Tensor | None = harness.deepspeed.utils.safe_get_full_grad(parameter)
    return found


def both() -> Any:
    plain = train(None)
    seen = train({"monitor": MONITOR})
    assert seen[:2] == plain[:2]
    frame = seen[3][0]
    sent = [(s.name, s.micro_step) for s in frame.samples if s.family == "other"]
    frame.samples[:] = [s for s in frame.samples if s.family != "other"]
    return plain[2], harness.samples_of(frame), sent, seen[4], frame.scalars


def test_experts() -> None:
    """Same bits; gradients of experts and of everything else are DeepSpeed's own gathered ones, experts are marked, the exchange of
    tokens is seen, and what both ranks share is found equal while experts are not compared."""
    found = run_ranks(2, both)
    for rank, (truth, samples, sent, where, scalars) in enumerate(found):
        seen = {k[2]: v for k, v in samples.items() if k[0] == "grad_reduced"}
        assert set(seen) == set(truth)
        for name, norm in truth.items():
            statistics, facts = seen[name]
            assert statistics.norm == pytest.approx(norm, rel=2e-2), name
            assert facts.get("expert", False) is ("deepspeed_experts" in name), name
        assert any("all_to_all" in name for name, _ in sent), sorted(set(sent))
        assert where["ep"] == rank
        assert scalars["grad_norm"] > 0
    experts = [{k[2]: v[0].norm for k, v in f[1].items() if k[0] == "grad_reduced" and "deepspeed_experts" in k[2]} for f in found]
    assert experts[0] != experts[1]
    shared = [{k[2]: v[0].norm for k, v in f[1].items() if k[0] == "grad_reduced" and "deepspeed_experts" not in k[2]} for f in found]
    assert shared[0] == shared[1]
