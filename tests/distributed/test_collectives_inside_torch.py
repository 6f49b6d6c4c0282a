"""Collectives that no public function was called for, and those that torch itself calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from distributed_job import Seen, distributed, frames, full, records
from forkpool import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore

from msprobe_engine.core.statistics import rows

pytestmark = pytest.mark.framework


def ddp(options: dict[str, Any], hook: bool) -> tuple[list[Seen], dict[str, int], float, float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-4, **options)
    if hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    x = torch.arange(16.0).reshape(4, 4) * (dist.get_rank() + 1)

    def work() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    last = frames(work, "mix", model, steps=3)[-1]
    outputs = [e.sections["output"][0] for e in last.entries if "all_reduce." in e.name]
    in_buckets = sum(rows.read_row(last.rows[ref.row]).mean * ref.description.shape[0] for ref in outputs)
    gradients = sum(float(p.grad.double().sum()) for p in net.parameters() if p.grad is not None)
    return distributed(last), last.lost, in_buckets, gradients


@pytest.mark.parametrize(("options", "hook"), [({}, False), ({"gradient_as_bucket_view": True}, False), ({"static_graph": True}, True)])
def test_ddp(options: dict[str, Any], hook: bool) -> None:
    """Outputs of the reducer's buckets, for which only C++ waits, and of the broadcast of buffers are recorded: the buckets hold the
    gradients that the parameters get. The numbers of ``all_reduce`` are left to the user's calls."""
    zero, one = run_ranks(2, ddp, options, hook)
    found, lost, in_buckets, gradients = zero
    assert lost == {}
    assert in_buckets == pytest.approx(gradients, rel=1e-4)
    assert all(r.tags["group_ranks"] == [0, 1] for r in found)
    reduced = [k for k, r in enumerate(found) if r.name.startswith("all_reduce." if hook else "c10d_all_reduce.")]
    assert len(reduced) == 2
    assert all(found[k].args != one[0][k].args and found[k].output[0] == one[0][k].output[0] for k in reduced)
    assert sum("c10d_broadcast" in r.name for r in found) >= 2
    assert all(r.output is not None for r in found)


def sharded() -> list[Seen]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return records(lambda: net(torch.ones(3, 4)).sum().backward(), "mix", net)[0]


def test_fsdp2() -> None:
    """Parameters are gathered and gradients scattered; the rank's own part of the gathered buffer has values."""
    for found in run_ranks(2, sharded):
        names = [r.name.rpartition(".")[0] for r in found]
        assert [n.startswith("all_gather") for n in names] == [True] * 4 + [False] * 2
        assert all("?" not in (*r.args, *r.kwargs.values(), *r.output) for r in found)


def tensor_parallel() -> list[Seen]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    whole = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])

    def work() -> None:
        net(torch.ones(3, 4, requires_grad=True)).sum().backward()
        whole.redistribute(mesh, [Replicate()]).sum()

    return records(work, "mix", net)[0]


def test_tensor_parallel() -> None:
    """The all-reduce of the row-parallel layer, that of the column-parallel layer's input gradient and a redistribution are seen, with
    outputs that DTensor waits for."""
    found, other = run_ranks(2, tensor_parallel)
    assert [r.name for r in found] == [
        "functional_all_reduce.0",
        "functional_all_reduce.1",
        "functional_all_gather_into_tensor.0",
    ]
    assert all(isinstance(r.output[0], float) for r in found)
    assert [r.output for r in found] == [r.output for r in other]
    assert (found[2].args, found[2].output) == ([1.5], [3.5])


def functions() -> tuple[list[Seen], dict[str, int], Any]:
    from torch.distributed.nn import functional as differentiable

    rank = dist.get_rank()
    x, y = (full(rank + 1).requires_grad_() for _ in range(2))
    unused: list[Any] = []

    def work() -> None:
        total = functional.all_reduce(x, "sum", dist.group.WORLD)
        (total * (rank + 1)).sum().backward()
        differentiable.all_reduce(y, group=dist.group.WORLD).mul(rank + 1).sum().backward()
        both = functional.all_reduce_coalesced([full(rank), full(rank + 1, 3)], "max", dist.group.WORLD)
        both[1].wait()
        unused.append(functional.all_reduce(full(1), "sum", dist.group.WORLD))

    found, lost = records(work)
    for tensor in (both := unused):
        tensor.wait()
    assert both
    return found, lost, (x.grad, y.grad)


def test_functional_collectives() -> None:
    """Forward and backward of both families of differentiable collectives are recorded, and their gradients are the same as without the
    probe. Results come one by one; those that nobody used stay null."""
    found, lost, (x, y) = run_ranks(2, functions)[0]
    by_name = {r.name: r for r in found}
    assert (by_name["functional_all_reduce.0"].args, by_name["functional_all_reduce.0"].output) == ([1.0], [3.0])
    assert (by_name["functional_all_reduce.1"].args, by_name["functional_all_reduce.1"].output) == ([1.0], [3.0])
    assert (by_name["all_reduce.0"].output[0], by_name["all_reduce.1"].output[0]) == (3.0, 3.0)
    assert x.tolist() == y.tolist() == [3.0, 3.0]
    part = by_name["functional_all_reduce_coalesced.0"]
    assert (part.output, part.tags["incomplete"]) == ([None, 2.0], True)
    assert by_name["functional_all_reduce.2"].output is None
    assert list(lost.values()) == [2]


def in_backward() -> list[tuple[str, str | None]]:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(x * 2, "sum", dist.group.WORLD) * 3

    net = nn.Sequential(Sums(), nn.Linear(2, 2))
    found = records(lambda: net(torch.ones(3, 2, requires_grad=True)).sum().backward(), "mix", net)[0]
    return [(r.name, r.parent) for r in found]


def test_parent_in_a_backward_pass() -> None:
    """A collective of a module's backward pass hangs under the module's backward record."""
    assert run_ranks(2, in_backward)[0] == [
        ("functional_all_reduce.0", "Module.0.Sums.forward.0"),
        ("functional_all_reduce.1", "Module.0.Sums.backward.0"),
    ]


def coalesced() -> list[Seen]:
    rank = dist.get_rank()

    def work() -> None:
        with dist._coalescing_manager(async_ops=True) as manager:
            for k in range(2):
                dist.all_reduce(full(rank + k))
        manager.wait()

    return records(work)[0]


def test_coalesced() -> None:
    """What a coalescing manager collects is one operation."""
    (found,) = run_ranks(2, coalesced)[0]
    assert (found.name, found.args, found.output) == ("c10d_all_reduce_coalesced.0", [0.0, 1.0], [1.0, 3.0])


@pytest.fixture
def _no_communication() -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_no_communication")
@pytest.mark.parametrize("waits", [True, False])
def test_a_block_of_messages(waits: bool) -> None:
    """Backends that coalesce give one work for a block; its messages are complete when that was waited for, not before."""

    def work() -> None:
        group = dist.group.WORLD
        with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
            dist.irecv(torch.ones(2), 1)
            dist.isend(torch.ones(2), 1)
        if waits:
            manager.wait()

    (received, sent), lost = records(work)
    assert (received.name, received.args) == ("irecv.0", [None, 1])
    assert sent.output == [None, 1]
    assert received.output == ([1.0, 1] if waits else None)
    assert bool(lost) is not waits
