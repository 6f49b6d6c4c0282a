"""Records of calls of public functions: arguments as they were passed, outputs after completion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_job import Seen, full, records
from forkpool import run_ranks
from torch import nn
from torch.distributed import all_reduce as imported_early

pytestmark = pytest.mark.framework


def every_function() -> list[Seen]:
    rank = dist.get_rank()
    group = dist.new_group([0, 1])

    def two() -> list[torch.Tensor]:
        return [torch.zeros(2), torch.zeros(2)]

    def work() -> None:
        imported_early(full(rank + 1))
        dist.all_reduce(full(rank), dist.ReduceOp.MAX, group, False)
        dist.all_reduce(tensor=full(rank), op=dist.ReduceOp.SUM, group=group)
        dist.all_reduce(torch.full((2,), rank + 2 + 0j))
        dist.broadcast(full(rank + 5), 1)
        dist.broadcast(full(rank + 5), group_src=0, group=group)
        dist.reduce(full(rank + 5), 0)
        dist.all_gather(two(), full(rank + 1))
        dist.all_gather_into_tensor(torch.zeros(4), input_tensor=full(rank + 1))
        dist._all_gather_base(torch.zeros(4), full(rank + 1))
        dist.reduce_scatter(torch.zeros(2), [full(rank), full(rank + 1)])
        dist.reduce_scatter_tensor(output=torch.zeros(2), input=torch.arange(4.0))
        dist._reduce_scatter_base(torch.zeros(2), torch.arange(4.0))
        dist.all_to_all_single(torch.zeros(2), full(rank))
        dist.all_to_all(two(), [full(rank), full(rank + 7)])
        dist.gather(full(rank), two() if rank == 0 else None, 0)
        dist.scatter(torch.zeros(2), [full(1), full(2)] if rank == 0 else None, 0)
        dist.all_reduce_coalesced([full(rank), full(rank + 1)])

    return records(work)[0]


def test_every_function() -> None:
    """Positional arguments stay positional, keywords keywords; buffers that are only written to are null before; the output is all
    positional arguments followed by all keyword values; the first stack line is the user's; every entry has group and operation."""
    zero, one = run_ranks(2, every_function)
    both = [0, 1]
    got = [(r.name, r.args, r.kwargs, r.output) for r in zero]
    assert got == [
        ("all_reduce.0", [1.0], {}, [3.0]),
        ("all_reduce.1", [0.0, "RedOpType.MAX", both, False], {}, [1.0, "RedOpType.MAX", both, False]),
        ("all_reduce.2", [], {"tensor": 0.0, "op": "RedOpType.SUM", "group": both}, [1.0, "RedOpType.SUM", both]),
        ("all_reduce.3", [2.0], {}, [5.0]),
        ("broadcast.0", [5.0, 1], {}, [6.0, 1]),
        ("broadcast.1", [5.0], {"group_src": 0, "group": both}, [5.0, 0, both]),
        ("reduce.0", [5.0, 0], {}, [11.0, 0]),
        ("all_gather.0", [None, 1.0], {}, [[1.0, 2.0], 1.0]),
        ("all_gather_into_tensor.0", [None], {"input_tensor": 1.0}, [1.5, 1.0]),
        ("_all_gather_base.0", [None, 1.0], {}, [1.5, 1.0]),
        ("reduce_scatter.0", [None, [0.0, 1.0]], {}, [1.0, [0.0, 1.0]]),
        ("reduce_scatter_tensor.0", [], {"output": None, "input": 1.5}, [1.0, 1.5]),
        ("_reduce_scatter_base.0", [None, 1.5], {}, [1.0, 1.5]),
        ("all_to_all_single.0", [None, 0.0], {}, [0.5, 0.0]),
        ("all_to_all.0", [None, [0.0, 7.0]], {}, [[0.0, 1.0], [0.0, 7.0]]),
        ("gather.0", [0.0, None, 0], {}, [0.0, [0.0, 1.0], 0]),
        ("scatter.0", [None, [1.0, 2.0], 0], {}, [1.0, [1.0, 2.0], 0]),
        ("all_reduce_coalesced.0", [[0.0, 1.0]], {}, [[1.0, 3.0]]),
    ]
    assert {r.name: r.output for r in one}["scatter.0"] == [2.0, None, 0]
    assert {r.name: r.output for r in one}["gather.0"] == [1.0, None, 0]
    for record in (*zero, *one):
        assert record.tags["group_ranks"] == both
        assert record.tags["async"] is False
        assert __file__ in record.line
    tags = {r.name: r.tags for r in zero}
    assert tags["all_reduce.1"]["reduce"] == "max"
    assert tags["broadcast.0"]["root"] == 1


def within() -> list[Seen]:
    class Gathers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x)
            return x

    model = nn.Sequential(Gathers())
    return records(lambda: model(full(1)), "mix", model)[0]


def test_parent() -> None:
    """A collective inside a module's forward hangs under it."""
    assert run_ranks(2, within)[0][0].parent == "Module.0.Gathers.forward.0"


def counted() -> list[str]:
    rank = dist.get_rank()

    def work() -> None:
        dist.all_gather_object([None, None], {"rank": rank})
        dist.broadcast_object_list([rank], 0)
        dist.barrier()
        dist.all_gather([torch.zeros(2), torch.zeros(2)], full(1))
        dist.broadcast(full(1), 0)

    return [r.name for r in records(work)[0]]


def test_objects_count_and_have_no_record() -> None:
    """The two gathers of an object collective take numbers, as in the existing tool, but make no records; barriers make none either."""
    assert run_ranks(2, counted)[0] == ["all_gather.2", "broadcast.2"]


def filtered(options: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    def work() -> None:
        dist.all_reduce(full(1))
        dist.broadcast(full(2), 0)

    found = []
    for record in records(work, **options)[0]:
        found.append((record.name, record.args, record.output))
    return found


def test_data_mode_and_level() -> None:
    """Sections that are not asked for are not there; backward alone, and level L0, make no distributed records."""
    assert run_ranks(2, filtered, {"data_mode": ["input"]})[0] == [("all_reduce.0", [1.0], None), ("broadcast.0", [2.0, 0], None)]
    assert run_ranks(2, filtered, {"data_mode": ["output"]})[0] == [("all_reduce.0", None, [2.0]), ("broadcast.0", None, [2.0, 0])]
    assert run_ranks(2, filtered, {"data_mode": ["backward"]})[0] == []
    assert run_ranks(2, filtered, {"level": "L0"})[0] == []


def listed() -> list[str]:
    from msprobe_integrations.common.capture.filters import RecordFilter

    def work() -> None:
        dist.all_reduce(full(1))
        dist.broadcast(full(2), 0)
        dist.all_reduce(full(1))

    return [r.name for r in records(work, kept=RecordFilter(names=["all_reduce.1", "broadcast"], level="L1"))[0]]


def test_list() -> None:
    """``list`` chooses distributed records as it does others; calls that are left out count."""
    assert run_ranks(2, listed)[0] == ["broadcast.0", "all_reduce.1"]


def fails() -> list[Seen]:
    def work() -> None:
        with pytest.raises(Exception, match="gather"):
            dist.all_gather_into_tensor(torch.zeros(3), full(1))
        dist.all_reduce(full(1))

    return records(work)[0]


def test_a_call_that_fails() -> None:
    """The entry of a call that raises has no output and says so; the next call is recorded."""
    first, second = run_ranks(2, fails)[0]
    assert (first.output, first.tags.get("raised")) == (None, True)
    assert second.output == [2.0]


def sizes_in_arrays() -> list[Seen]:
    def work() -> None:
        taken, given = (np.array([3, 5]), np.array([3, 1])) if dist.get_rank() == 0 else (np.array([1, 7]), np.array([5, 7]))
        for _ in range(4):
            dist.all_to_all_single(torch.zeros(8), torch.zeros(int(given.sum())), taken, given)

    return records(work)[0]


def test_each_array_has_its_own_numbers_again() -> None:
    """Sizes that come as arrays of numpy are in the output what they were in the input, each its own."""
    for seen, means in zip(run_ranks(2, sizes_in_arrays), ([4.0, 2.0], [4.0, 6.0])):
        assert [(one.args[2:], one.output[2:]) for one in seen] == [(means, means)] * 4
