"""Outputs of asynchronous work: recorded when somebody has waited, never waited for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_job import Seen, full, records
from forkpool import run_ranks

from msprobe_integrations.torch.collectives.observer import LOST

pytestmark = pytest.mark.framework


def waited_for() -> tuple[list[Seen], dict[str, int]]:
    rank = dist.get_rank()

    def later(value: float) -> Any:
        return dist.all_reduce(full(value), async_op=True)

    def work() -> None:
        later(rank).wait()
        asked = later(rank + 1)
        while not asked.is_completed():
            time.sleep(0.001)
        later(rank + 2).get_future().wait()
        changed = full(rank + 3)
        future = dist.all_reduce(changed, async_op=True).get_future()
        future.then(lambda _: changed.mul_(100)).wait()
        gathered = [torch.zeros(2), torch.zeros(2)]
        work = dist.all_gather(gathered, full(rank + 4), async_op=True)
        assert work is not None
        work.wait()
        gathered[0].zero_()  # after the wait: not what is recorded
        dist.all_reduce_coalesced([full(rank)], async_op=True).wait()

    return records(work)


def test_ways_to_wait() -> None:
    """`Work.wait`, `is_completed` asked until it is true, and the future's `wait` and `then` all end with the output recorded, as it was
    at that moment."""
    found, lost = run_ranks(2, waited_for)[0]
    outputs = [r.output[0] for r in found]
    assert outputs == [1.0, 3.0, 5.0, 7.0, [4.0, 5.0], [1.0]]
    assert all(r.tags["async"] for r in found)
    assert lost == {}


def nobody_waits() -> tuple[list[Seen], dict[str, int]]:
    rank = dist.get_rank()
    held: list[Any] = []

    def work() -> None:
        held.append(dist.all_reduce(full(rank), async_op=True))
        changed = full(rank)
        held.append(dist.all_reduce(changed, async_op=True))
        dist.barrier()
        time.sleep(0.2)  # both are complete, and nobody knows
        changed.add_(1)
        if rank == 0:
            held.append(dist.irecv(torch.zeros(2), 1, tag=7))

    result = records(work)
    dist.barrier()
    if rank == 1:
        held.append(dist.isend(full(1), 0, tag=7))
    for one in held:
        one.wait()
    return result


def test_nobody_waits() -> None:
    """At the step's end what is complete and untouched is recorded; what was written to since, or is not complete, stays null, says so
    and is counted."""
    (untouched, changed, open_), lost = run_ranks(2, nobody_waits)[0]
    assert untouched.output == [1.0, True]
    assert "incomplete" not in untouched.tags
    assert (changed.output, changed.tags["incomplete"]) == (None, True)
    assert (open_.name, open_.output, open_.tags["incomplete"]) == ("irecv.0", None, True)
    assert lost == {LOST: 2}


def messages() -> list[Seen]:
    rank = dist.get_rank()
    peer = 1 - rank

    def work() -> None:
        if rank == 0:
            dist.send(full(1), 1)
            dist.recv(torch.zeros(2))
        else:
            dist.recv(torch.zeros(2), 0)
            dist.send(full(2), group_dst=0)
        requests = [dist.isend(full(rank + 3), peer), dist.irecv(tensor=torch.zeros(2), src=peer)]
        for request in requests:
            request.wait()
        ring = [dist.P2POp(dist.irecv, torch.zeros(2), peer), dist.P2POp(dist.isend, full(rank + 8), peer, tag=3)]
        ring.append(dist.P2POp(dist.irecv, torch.zeros(2), peer, tag=3))
        ring.append(dist.P2POp(dist.isend, full(rank + 6), peer))
        for request in dist.batch_isend_irecv(ring):
            request.wait()
        args = (full(rank), peer)
        again = [dist.isend(*args), dist.irecv(*(torch.zeros(2), peer))]
        for request in again:
            request.wait()

    return records(work)[0]


def test_messages() -> None:
    """Sends and receives do not block each other; receive buffers are null before and recorded when filled. A batch is one entry with its
    list of messages; the tensor of a send that is under way is no output."""
    zero, one = run_ranks(2, messages)
    by_name = {r.name: r for r in zero}
    assert (by_name["send.0"].args, by_name["send.0"].output) == ([1.0, 1], [1.0, 1])
    assert (by_name["recv.0"].args, by_name["recv.0"].output) == ([None], [2.0])
    assert (by_name["isend.0"].args, by_name["isend.0"].output) == ([3.0, 1], [None, 1])
    assert (by_name["irecv.0"].args, by_name["irecv.0"].kwargs) == ([], {"tensor": None, "src": 1})
    assert by_name["irecv.0"].output == [4.0, 1]
    assert by_name["isend.0"].tags["peer"] == 1
    batch = by_name["batch_isend_irecv.0"]
    seen = [[(m["class_type"], m["op"], m["peer"], m["tag"], m["tensor"]) for m in part[0]] for part in (batch.args, batch.output)]
    p2p = "torch.distributed.P2POp"
    assert seen == [
        [(p2p, "irecv", 1, 0, "?"), (p2p, "isend", 1, 3, 8.0), (p2p, "irecv", 1, 3, "?"), (p2p, "isend", 1, 0, 6.0)],
        [(p2p, "irecv", 1, 0, 7.0), (p2p, "isend", 1, 3, 8.0), (p2p, "irecv", 1, 3, 9.0), (p2p, "isend", 1, 0, 6.0)],
    ]
    assert batch.args[0][0]["group_id"] == "77849d8c"
    assert [r.name for r in one].count("batch_isend_irecv.0") == 1
    assert not any(r.name.startswith(("isend.2", "irecv.2")) for r in zero)
    assert (by_name["irecv.1"].args, by_name["irecv.1"].kwargs, by_name["irecv.1"].output) == ([None], {"src": 1}, [1.0, 1])


def half_a_batch() -> tuple[list[Seen], dict[str, int]]:
    rank = dist.get_rank()
    sent: list[Any] = []

    def work() -> None:
        if rank == 0:
            sent.extend(dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(2), 1, tag=k) for k in range(2)]))
            sent.pop(0).wait()
        else:
            sent.append(dist.isend(full(1), 0, tag=0))

    result = records(work)
    dist.barrier()
    if rank == 1:
        sent.append(dist.isend(full(2), 0, tag=1))
    for request in sent:
        request.wait()
    return result


def test_a_batch_that_is_complete_in_part() -> None:
    """While one receive is open the batch has no output."""
    (batch,), lost = run_ranks(2, half_a_batch)[0]
    assert (batch.output, batch.tags["incomplete"], lost) == (None, True, {LOST: 1})
