"""Parallel training gives the same bits with distributed records and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from capturing import capture
from forkpool import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

pytestmark = pytest.mark.framework
STEPS = 4


def parallel(kind: str) -> nn.Module:
    """A small network, distributed as `kind` says."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 8))
    if kind.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-4, gradient_as_bucket_view=kind == "ddp view")
        if kind == "ddp hook":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return model
    net[1] = nn.LayerNorm(16)
    mesh = init_device_mesh("cpu", (2,))
    if kind == "fsdp2":
        for layer in (net[0], net[4], net):
            fully_shard(layer, mesh=mesh)
        return net
    net[1], net[2] = nn.Identity(), nn.Identity()  # of whole activations, and of one random stream
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "4": RowwiseParallel()})


def train(kind: str, recorded: bool) -> list[Any]:
    model = parallel(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    alike = kind == "tensor parallel"
    torch.manual_seed(5 + (0 if alike else dist.get_rank()))
    seen: list[Any] = []

    def step() -> None:
        x = torch.randn(4, 8)
        loss = model(x).square().mean()
        total = loss.detach().clone()
        work = dist.all_reduce(total, async_op=True)
        (loss + functional.all_reduce(loss, "sum", dist.group.WORLD) * 0.25).backward()
        assert work is not None
        work.wait()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.detach().numpy().tobytes(), total.numpy().tobytes()))

    if recorded:
        frames = capture(model, step, "mix", steps=STEPS)
        names = {e.name.split(".")[1] for f in frames for e in f.entries if e.name.startswith("Distributed.")}
        assert {"all_reduce", "functional_all_reduce"} <= names
    else:
        for _ in range(STEPS):
            step()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        seen.append(local.detach().numpy().tobytes())
    return [*seen, torch.get_rng_state().numpy().tobytes()]


def both(kind: str) -> tuple[list[Any], list[Any]]:
    return train(kind, False), train(kind, True)


@pytest.mark.parametrize("kind", ["ddp", "ddp view", "ddp hook", "fsdp2", "tensor parallel"])
@pytest.mark.fast_cells("ddp hook", "ddp view", "ddp", "tensor parallel")
def test_same_bits(kind: str) -> None:
    """Losses, weights and random state after some steps are bitwise equal with a capture of level mix and without."""
    for without, recorded in run_ranks(2, both, kind):
        assert recorded == without
