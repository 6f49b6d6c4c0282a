"""Four ranks in groups of two, and ranks that are in none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_job import Seen, distributed, frames, full
from forkpool import run_ranks

from msprobe_engine.find.collectives import links
from msprobe_engine.find.nonfinite import trace
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink

pytestmark = pytest.mark.framework


def in_groups(dump: str) -> list[Seen]:
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, other, across = halves[rank // 2], halves[1 - rank // 2], crossed[rank % 2]

    def work() -> None:
        dist.all_reduce(full(rank), group=mine)
        dist.all_reduce(full(rank), group=other)
        dist.broadcast(full(rank), group_src=1, group=mine)
        dist.reduce(full(rank), group_dst=0, group=across)
        if rank in (0, 2):
            dist.send(full(5), group_dst=1, group=mine)
        else:
            dist.recv(torch.zeros(2), group_src=0, group=mine)
        peer = rank + 2 if rank < 2 else rank - 2
        ring = [dist.P2POp(dist.isend, full(rank), peer, across), dist.P2POp(dist.irecv, torch.zeros(2), peer, across)]
        for request in dist.batch_isend_irecv(ring):
            request.wait()
        dist.all_reduce(full(1))

    (frame,) = frames(work)
    DumpSink(Path(dump), level="L1", rank=rank).write(dataclasses.replace(frame, rank=rank))
    return distributed(frame)


def test_groups(tmp_path: Path) -> None:
    """Ranks in tags are global ranks. A call on a rank outside its group is recorded as the existing tool does, without members, and
    takes a number; the search for the first NaN does not count it."""
    found = run_ranks(4, in_groups, str(tmp_path))
    for rank, records_ in enumerate(found):
        half = [0, 1] if rank < 2 else [2, 3]
        by_name = {r.name: r for r in records_}
        assert by_name["all_reduce.0"].tags["group_ranks"] == half
        assert by_name["all_reduce.0"].output == [sum(half), half]
        outside = by_name["all_reduce.1"]
        assert (outside.kwargs, outside.output, outside.tags) == ({"group": -100}, [float(rank), -100], {"group_ranks": []})
        assert by_name["all_reduce.2"].output == [4.0]
        assert (by_name["broadcast.0"].tags["root"], by_name["broadcast.0"].output[0]) == (half[1], float(half[1]))
        assert by_name["reduce.0"].tags["root"] == rank % 2
        message = by_name["send.0" if rank in (0, 2) else "recv.0"]
        assert message.tags["peer"] == (half[1] if rank in (0, 2) else half[0])
        batch = by_name["batch_isend_irecv.0"]
        assert [m["peer"] for m in batch.args[0]] == [(rank + 2) % 4] * 2
        assert [m["tensor"] for m in batch.output[0]] == [float(rank), float((rank + 2) % 4)]
    traces = {}
    for rank in range(4):
        traces[rank] = trace.trace(read_side(tmp_path / "step0" / f"rank{rank}" / "dump.json"), step=0, rank=rank)
    linked = links.match_traces(traces).links
    assert all(not link.missing for link in linked)
    assert sorted(len(link.members) for link in linked if link.op == "allreduce") == [2, 2, 4]
    assert sorted(link.members for link in linked if link.op == "send" and {r for r, _ in link.members} == {0, 2})
