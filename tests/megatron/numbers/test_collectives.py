"""What the collective observer sees, and that it leaves nothing behind."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks
from megatron_harness import train_gpt

from msprobe_engine.core.records import Entry, Opaque, TensorDescription, TensorRef
from msprobe_integrations.torch.collectives.kernels import kernels
from msprobe_integrations.torch.collectives.observer import CollectiveObserver
from msprobe_integrations.torch.ranks.merge import RowExchange


class Seen:
    """Stands for backend and pipeline: sums instead of rows."""

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.entries: list[Entry] = []
        self.forgotten = 0

    def reduce(self, tensor: torch.Tensor) -> TensorRef:
        self.sums.append(float(tensor.double().sum()))
        return TensorRef(len(self.sums) - 1, TensorDescription("torch.Tensor", str(tensor.dtype), tuple(tensor.shape), None))

    def forget(self, _tensor: torch.Tensor) -> None:
        self.forgotten += 1

    def plain(self, node: Any) -> Any:
        """A structure with sums in place of tensors, and plain values."""
        if isinstance(node, TensorRef):
            return self.sums[node.row]
        if isinstance(node, Opaque):
            return node.json.get("value", node.json.get("group_ranks"))
        if isinstance(node, dict):
            return {key: self.plain(child) for key, child in node.items()}
        return None if node is None else [self.plain(child) for child in node]


def observer() -> tuple[Seen, CollectiveObserver]:
    seen = Seen()
    found = CollectiveObserver(seen.reduce, seen.entries.append)
    kernels.add(found)
    return seen, found


def calls() -> list[tuple[str, Any, Any, dict[str, Any]]]:
    seen, watch = observer()
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    early = dist.all_reduce
    t = torch.full((2,), rank + 1.0)
    early(t)
    work = dist.all_reduce(torch.full((3,), float(rank)), async_op=True, group=pair)
    assert work.wait() is True
    out = torch.zeros(4)
    dist.all_gather_into_tensor(out, torch.full((2,), rank + 1.0))
    b = torch.full((2,), float(rank + 5))
    dist.broadcast(b, src=1)
    if rank == 0:
        dist.send(torch.ones(2), dst=1)
    else:
        dist.recv(torch.zeros(2), src=0)
    halves = torch.zeros(2)
    dist.reduce_scatter_tensor(halves, torch.arange(4.0))
    swapped = torch.zeros(2)
    dist.all_to_all_single(swapped, torch.full((2,), float(rank)))
    import torch.distributed._functional_collectives as functional

    total = functional.all_reduce(torch.full((2,), rank + 1.0), "sum", dist.group.WORLD)
    assert float(total.sum()) == 6.0
    dist.all_gather_object([None, None], {"rank": rank})
    dist.barrier()
    exchange = RowExchange(None)
    before = len(seen.entries)
    import numpy as np

    edit = exchange.merge(0, ["a"], [0])
    edit.start(np.zeros((1, 16)))
    edit.wait(5)
    assert len(seen.entries) == before, "the probe's own exchange was seen"
    kernels.discard(watch)
    n = len(seen.entries)
    dist.all_reduce(torch.ones(1))
    assert len(seen.entries) == n, "still seeing after remove"
    assert seen.forgotten > 0
    return [
        (
            e.name,
            seen.plain(e.sections["input_args"]),
            seen.plain(e.sections["output"]),
            dict(e.tags),
        )
        for e in seen.entries
    ]


@pytest.mark.framework
def test_every_kind_of_collective() -> None:
    """Calls through early imported names, asynchronous, point-to-point and functional collectives give entries in call order with the
    group's global ranks, the input before and the output after completion; object collectives and barriers count, and give none."""
    zero, one = run_ranks(2, calls)
    by_name = {name: (inputs, outputs, tags) for name, inputs, outputs, tags in zero}
    assert by_name["Distributed.all_reduce.0.forward"] == ([2.0], [6.0], {"group_ranks": [0, 1], "reduce": "sum", "async": False})
    assert by_name["Distributed.all_reduce.1.forward"] == (
        [0.0],
        [3.0, True, [0, 1]],
        {"group_ranks": [0, 1], "reduce": "sum", "async": True},
    )
    assert by_name["Distributed.all_gather_into_tensor.0.forward"][:2] == ([None, 2.0], [6.0, 2.0])
    assert by_name["Distributed.broadcast.0.forward"] == ([10.0], [12.0, 1], {"group_ranks": [0, 1], "root": 1, "async": False})
    assert by_name["Distributed.send.0.forward"] == ([2.0], [2.0, 1], {"group_ranks": [0, 1], "peer": 1})
    received = {name: (inputs, outputs, tags) for name, inputs, outputs, tags in one}["Distributed.recv.0.forward"]
    assert received == ([None], [2.0, 0], {"group_ranks": [0, 1], "peer": 0})
    assert by_name["Distributed.reduce_scatter_tensor.0.forward"][:2] == ([None, 6.0], [2.0, 6.0])
    assert by_name["Distributed.all_to_all_single.0.forward"][:2] == ([None, 0.0], [1.0, 0.0])
    assert by_name["Distributed.functional_all_reduce.0.forward"][:2] == ([2.0], [6.0])
    order = [name.split(".")[1] for name, *_ in zero]
    assert order[:5] == ["all_reduce", "all_reduce", "all_gather_into_tensor", "broadcast", "send"]
    assert "barrier" not in order
    assert "all_gather" not in order


def gpt(argv: str) -> tuple[Counter[str], Counter[str]]:
    seen, watch = observer()
    a = train_gpt.arguments(["--quiet", "--steps", "2", *argv.split()])
    _, chunks, optimizer = train_gpt.build(a)
    seen.entries.clear()
    train_gpt.train(a, chunks, optimizer)
    kernels.discard(watch)
    names = [(e.name.split(".")[1], e.sections["output"] is not None) for e in seen.entries]
    return Counter(n for n, _ in names), Counter(n for n, done in names if done)


@pytest.mark.fast_cells("--distopt --overlap --overlap-param-expected0")
@pytest.mark.framework
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--distopt --overlap --overlap-param", {"c10d_reduce_scatter_tensor_coalesced", "c10d_all_gather_into_tensor_coalesced"}),
        ("--tp 2", {"all_reduce"}),
        ("--pp 2 --untie", {"batch_isend_irecv"}),
        ("--ep 2 --experts 4", {"all_to_all_single"}),
    ],
)
def test_megatron_collectives(argv: str, expected: set[str]) -> None:
    """The collectives of data, tensor, pipeline and expert parallel training are seen, with outputs wherever Python waits."""
    for started, finished in run_ranks(2, gpt, argv):
        assert expected & set(started)
        for name in expected & set(started):
            assert finished[name] == started[name]


def broken() -> tuple[bool, float]:
    def fails(_tensor: torch.Tensor) -> TensorRef:
        raise ValueError("planted")

    errors: list[Exception] = []
    watch = CollectiveObserver(fails, lambda _: None, fail=errors.append)
    kernels.add(watch)
    t = torch.ones(1)
    dist.all_reduce(t)
    dist.all_reduce(t)
    kernels.discard(watch)
    return len(errors) == 1, float(t)


def test_a_fault_in_the_observer_does_not_reach_training() -> None:
    """An exception while looking is reported once; the collective goes on."""
    assert run_ranks(2, broken) == [(True, 4.0)] * 2


def test_nothing_is_left_behind() -> None:
    """After the last observer is gone `Work.wait` is the original and no kernel is registered."""
    original = dist.Work.wait
    _, first = observer()
    _, second = observer()
    assert dist.Work.wait is not original
    kernels.discard(first)
    assert dist.Work.wait is not original
    kernels.discard(second)
    assert dist.Work.wait is original
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")
