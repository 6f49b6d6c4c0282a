"""Which calls of several ranks belong together."""

from __future__ import annotations

from typing import Any

from msprobe_engine.core.operator_traits import normal_op
from msprobe_engine.find.collectives import links


def test_a_call_outside_its_group_is_no_participation(rank_dump: Any) -> None:
    """The existing tool records a call on a rank that is not in the group, with torch's number -100 for that group: it does not take the
    place of the next collective of all ranks."""
    traces = {}
    for rank in range(3):
        dump = rank_dump()
        if rank == 2:
            dump.api("Distributed.all_reduce", ["ok"], ["ok"], kwargs={"group": -100})
        else:
            dump.comm("all_reduce", ["ok"], ["ok"], group=[0, 1])
        dump.api("Distributed.all_reduce", ["ok"], ["ok"])
        traces[rank] = dump.trace(rank)
    found = links.match_traces(traces).links
    assert sorted(len(link.members) for link in found) == [2, 3]
    assert all(not link.missing for link in found)


def test_operations_have_one_spelling() -> None:
    """Calls that did not come through a public function are the same operation."""
    for name in ("all_reduce", "allreduce_", "c10d_all_reduce", "functional_all_reduce", "AllReduce"):
        assert normal_op(name) == "allreduce"
