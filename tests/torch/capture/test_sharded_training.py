"""Sharded training (FSDP2, tensor parallelism): records hold this rank's part, where it lies and the shape of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capturing import capture, entries, stat
from forkpool import run_ranks
from torch import nn
from torch.nn import functional as F

from msprobe_engine.core.records import TensorRef, leaves

pytestmark = pytest.mark.framework


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(kind: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        if kind == "fsdp2":
            fully_shard(layer, mesh=mesh)
        else:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh) if kind == "fsdp2" else model


def described(kind: str, level: str) -> dict[str, dict[str, Any]]:
    """Per record and place: shape, facts about the placement, and norm, of the second step."""
    model = sharded(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(3, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    frame = capture(model, step, level, steps=2)[1]

    def fact(ref: TensorRef) -> dict[str, Any]:
        d = ref.description
        return {"shape": list(d.shape), "norm": None if ref.row < 0 else stat(frame, ref).norm, "type": d.type, **dict(d.extra)}

    found = {name: {place: fact(ref) for place, ref in leaves(entry)} for name, entry in entries(frame).items()}
    found["parents"] = {name: entry.parent for name, entry in entries(frame).items()}
    return found


SHARD = {"Shard": {"dim": 0}}


def test_fsdp2() -> None:
    """Parameters and their gradients are local shards with placement, mesh and global shape, whether the module is unsharded at that
    moment or not; an API sees the whole weight, with its values. The machinery's own calls are no records."""
    for found in run_ranks(2, described, "fsdp2", "mix"):
        module = found["Module.layers.0.up.Linear.forward.0"]
        for place, local, whole in (("parameters.weight", [8, 8], [16, 8]), ("parameters.bias", [8], [16])):
            fact = module[place]
            assert (fact["shape"], fact["global_shape"], fact["placements"], fact["device_mesh"]) == (local, whole, [SHARD], [0, 1])
            assert fact["norm"] is not None
        gradients = found["Module.layers.0.up.Linear.parameters_grad.0"]
        assert (gradients["weight.0"]["shape"], gradients["weight.0"]["placements"]) == ([8, 8], [SHARD])
        assert gradients["weight.0"]["norm"] > 0
        linear = found["Functional.linear.0.forward"]
        assert linear["input.1"]["shape"] == [16, 8]
        assert linear["input.1"]["norm"] > 0
        assert found["Functional.linear.1.backward"]["output.1"]["shape"] == [8, 16]
        assert found["parents"]["Functional.linear.0.forward"] == "Module.layers.0.up.Linear.forward.0"
        assert not [n for n in found if n.startswith(("fsdp.", "Autograd.", "Torch.as_strided", "Torch.empty"))]
        assert [n for n in found if n.startswith("Distributed.")]


def twice_in_a_step() -> tuple[list[float], list[float], list[float]]:
    """Norms of a weight of FSDP2 on one rank before and after an update inside one step: recorded, and as they are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    held: list[float] = []

    def step() -> None:
        for _ in range(2):
            held.append(float(next(iter(model.parameters())).full_tensor().norm()))
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    frames = capture(model, step, "mix", steps=2)
    places = [[dict(leaves(entries(frame)[f"Functional.linear.{call}.forward"]))["input.1"] for call in range(2)] for frame in frames]
    recorded = [stat(frame, ref).norm for frame, refs in zip(frames, places, strict=True) for ref in refs if ref.row >= 0]
    return recorded, held, [ref.row for refs in places for ref in refs]


def test_fsdp2_on_one_rank() -> None:
    """There nothing is gathered: FSDP2 copies the shards into memory without values and leaves its version as it was. The weight of a call
    has its values all the same, and those of after an update are not those of before."""
    ((recorded, held, rows),) = run_ranks(1, twice_in_a_step)
    assert min(rows) >= 0
    assert recorded == pytest.approx(held, rel=1e-6)
    assert len(set(recorded)) == 4


def test_tensor_parallel() -> None:
    """Inputs, parameters, outputs and gradients are local parts with their placements; an output that is still on its way when the
    module ends gets its values when it has arrived."""
    ranks = run_ranks(2, described, "tp", "mix")
    for found in ranks:
        up, down = found["Module.layers.0.up.Linear.forward.0"], found["Module.layers.0.down.Linear.forward.0"]
        assert (up["input.0"]["placements"], up["input.0"]["global_shape"]) == ([{"Replicate": {}}], [3, 8])
        assert (up["parameters.weight"]["shape"], up["parameters.weight"]["placements"]) == ([8, 8], [SHARD])
        assert (down["input.0"]["shape"], down["input.0"]["global_shape"]) == ([3, 8], [3, 16])
        assert down["parameters.weight"]["placements"] == [{"Shard": {"dim": 1}}]
        assert down["output.0"]["norm"] > 0
        assert found["Tensor.__add__.0.forward"]["input.1"]["norm"] == down["output.0"]["norm"]
        gradient = found["Module.layers.1.up.Linear.backward.0"]["output.0"]
        assert gradient["placements"] == [{"Partial": {"reduce_op": "sum"}}]
        assert found["Module.layers.0.up.Linear.parameters_grad.0"]["weight.0"]["placements"] == [SHARD]
        assert not [n for n in found if n.startswith(("Autograd.", "Aten."))]
        assert found["parents"]["Distributed.functional_all_reduce.0.forward"] == "Module.layers.0.down.Linear.forward.0"
    # what is whole is the same on both ranks, what is split is not
    first, second = (r["Module.layers.0.down.Linear.forward.0"] for r in ranks)
    assert first["output.0"]["norm"] == second["output.0"]["norm"]
    assert first["input.0"]["norm"] != second["input.0"]["norm"]
