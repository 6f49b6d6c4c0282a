"""Parameters over meshes of several dimensions: tensor parallel, and FSDP2 on top of it."""

from __future__ import annotations

from typing import Any

import parameter_cases as pc
import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from msprobe_integrations.torch.tensors import dtensors

pytestmark = pytest.mark.framework


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 5), nn.LayerNorm(5))


def job(data_ranks: int, unreduced: bool) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """Two steps of a model that is tensor parallel over two ranks and FSDP2 over `data_ranks`; the last frame."""
    mesh = init_device_mesh("cpu", (data_ranks, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(block(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if data_ranks > 1:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = pc.optimizer("adamw", model.parameters(), foreach=False)
    probe = pc.probe(**{**pc.EVERYTHING, "unreduced_gradients": unreduced, "micro_batch_gradients": unreduced})
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        for step in range(2):
            probe.begin_step(step)
            optimizer.zero_grad()
            model(pc.data(step, rank=dist.get_rank() // 2)).square().mean().backward()
            if step:
                before = {name: pc.whole(p) for name, p in model.named_parameters()}
            optimizer.step()
            probe.end_step()
    seen = pc.samples(frames[1])
    for name, p in model.named_parameters():
        pc.assert_same(seen["grad_reduced", name, "reduced"], pc.whole(p.grad), name)
        pc.assert_same(seen["param_origin", name, ""], before[name], name)
        pc.assert_same(seen["param_updated", name, ""], pc.whole(p), name)
        pc.assert_same(seen["exp_avg", name, ""], pc.whole(optimizer.state[p]["exp_avg"]), name)
        assert dtensors.is_dtensor(p) == ("placements" in seen["param_updated", name, ""].extra)
    return {key: (sample.statistics.norm, sample.shape, sample.extra.get("scope")) for key, sample in seen.items()}


@pytest.mark.slow
def test_tensor_parallel() -> None:
    """Rows of tensor-parallel shards merge, replicated parameters count once, and a gradient that is divided in another way than its
    parameter makes no row that looks like a whole one."""
    first, second = run_ranks(2, job, 1, True)
    assert first == second
    families = {key[0] for key in first}
    assert {"grad_reduced", "grad_unreduced", "update", "ratio", "other"} <= families


@pytest.mark.slow
def test_fsdp2_over_tensor_parallel() -> None:
    """Four ranks, two dimensions that divide: one exchange over both. Before the reduction a gradient is that of this rank's
    tensor-parallel shard, and says so."""
    results = run_ranks(4, job, 2, True)
    merged = [{key: value for key, value in result.items() if key[0] != "grad_unreduced"} for result in results]
    assert all(result == merged[0] for result in merged)
    local = {key[1:3]: value[1:] for key, value in results[0].items() if key[0] == "grad_unreduced"}
    assert local["0.weight", "accumulated"] == local["0.weight", "local"] == ((5, 8), "shard")
    assert local["3.weight", "accumulated"] == ((5,), None)


def mixed() -> None:
    model = pc.net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model.a, model.b, model.c):
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = pc.optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    probe = pc.probe(unreduced_gradients=True, micro_batch_gradients=True)
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        probe.begin_step(0)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model(pc.data(0, micro)).square().mean().backward()
        grads = {name: pc.whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        probe.end_step()
    samples = frames[0].samples
    seen = pc.samples(frames[0])
    for name, truth in grads.items():
        pc.assert_same(seen["grad_reduced", name, "reduced"], truth, name)
    kinds = {(s.phase, s.ref.description.dtype) for s in samples if s.family == "grad_unreduced"}
    assert kinds == {("local", "torch.bfloat16"), ("accumulated", "torch.float32")}


def test_mixed_precision() -> None:
    """FSDP2 that reduces in float32: micro batches are in the dtype they were computed in, their sum in that of the reduction."""
    run_ranks(2, mixed)


def scaler_job() -> list[float]:
    model = pc.wrapped("fsdp2", pc.net())
    optimizer = pc.optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    probe = pc.probe(gradient_phases=("reduced", "clipped"))
    norms = []
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        for step in range(2):
            probe.begin_step(step)
            model(pc.data(step)).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            norms.append(float(norm.full_tensor()))
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step()
    assert [frame.scalars["grad_norm"] for frame in frames] == pytest.approx(norms, rel=1e-6)
    for frame in frames:
        total = sum(seen.statistics.norm**2 for key, seen in pc.samples(frame).items() if key[2] == "clipped") ** 0.5
        assert total == pytest.approx(0.01, rel=1e-3)
    return norms


def test_clipping_under_fsdp2() -> None:
    """The norm that clipping gives is this rank's part of one; the number of the step is the whole one."""
    first, second = run_ranks(2, scaler_job)
    assert first == second
