"""Which calls of several ranks belong together."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.operator_traits import normal_op
from msprobe_engine.find.collectives import links
from msprobe_engine.find.run import diagnose


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


@pytest.mark.parametrize(
    ("results", "wrong"),
    [
        ("aab", {2: "rank 0"}),
        ("abb", {0: "rank 1"}),
        ("ab", {0: "the other ranks", 1: "the other ranks"}),
        ("aabb", dict.fromkeys(range(4), "the other ranks")),
        ("aaa", {}),
    ],
)
def test_whose_result_of_a_collective_is_wrong(results: str, wrong: dict[int, str], rank_dump: Any, tmp_path: Path) -> None:
    """A rank whose result is not that of most ranks; where no result is that of most, nobody knows whose it is, and all are named."""
    numbers = {letter: rank_dump.number("ok") for letter in sorted(set(results))}
    for rank, letter in enumerate(results):
        dump = rank_dump()
        dump.comm("broadcast", ["ok"], [numbers[letter]], group=list(range(len(results))))
        dump.write(tmp_path / "step0" / f"rank{rank}")
    record = "Distributed.broadcast.0.forward"
    said = {rank: f"{record}: rank {rank} gets another result than {others}, of one collective" for rank, others in wrong.items()}
    assert {suspect.rank: suspect.why for suspect in diagnose(tmp_path).suspects} == said


def test_operations_have_one_spelling() -> None:
    """Calls that did not come through a public function are the same operation."""
    for name in ("all_reduce", "allreduce_", "c10d_all_reduce", "functional_all_reduce", "AllReduce"):
        assert normal_op(name) == "allreduce"


def _random_links(chance: random.Random, ranks: int, calls: int) -> links.Links:
    """Collectives of random groups, messages, and batches of messages that wait for each other."""
    found, at = links.Links(), dict.fromkeys(range(ranks), 0)
    for _ in range(calls):
        group = chance.sample(range(ranks), chance.randint(2, ranks))
        members = []
        for rank in group:
            at[rank] += chance.randint(0, 2)
            members.append((rank, at[rank]))
        kind = chance.random()
        if kind < 0.4:
            found.add(links.Link("all_reduce", tuple(members), tuple(members), (), tuple(members)))
        elif kind < 0.6:
            found.add(links.Link("broadcast", (members[0],), tuple(members), (), tuple(members)))
        else:
            late = (members[1][0], chance.randint(0, at[members[1][0]] + 3))
            found.add(links.Link("send", (members[0],), (late,), (), (members[0], late)))
    chance.shuffle(found.links)
    return found.finish()


@pytest.mark.parametrize("seed", range(200))
def test_what_comes_before_what_is_the_same_for_all_at_once(seed: int) -> None:
    """Which beginnings follow from one of another rank is what following each of them alone shows, in any order of the links."""
    chance = random.Random(seed)
    ranks = chance.randint(2, 7)
    found = _random_links(chance, ranks, chance.randint(1, 15))
    places = {rank: chance.randint(0, 12) for rank in range(ranks) if chance.random() < 0.8}
    starts = {rank: place + chance.choice((0, 0.25)) for rank, place in places.items()}
    reach = {rank: found.reach(rank, start) for rank, start in starts.items()}
    expected = {
        rank for rank, place in places.items() if any(other != rank and reach[other].get(rank, math.inf) <= place for other in places)
    }
    assert found.find_possible_followers(starts, places) == expected


@pytest.mark.parametrize("ranks", [16, 128])
def test_links_are_followed_once_and_once_more_to_see_that_nothing_changes(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is linear in the links, in whatever order they are found: rows of stages that send to each other, and all ranks in one sum,
    with a beginning on each."""
    stages = 4
    found, index = links.Links(), 0
    for _micro in range(5):
        for stage in range(stages - 1):
            for rank in range(0, ranks, stages):
                pair = (rank + stage, 10 * index + 5 * stage), (rank + stage + 1, 10 * index)
                found.add(links.Link("send", pair[:1], pair[1:], (), pair))
        index += 1
    everyone = tuple((rank, 10 * index) for rank in range(ranks))
    found.add(links.Link("all_reduce", everyone, everyone, (), everyone))
    random.Random(0).shuffle(found.links)
    found.finish()
    looked: list[links.Link] = []
    once = links.Arrivals._go_along
    monkeypatch.setattr(links.Arrivals, "_go_along", lambda self, link: looked.append(link) or once(self, link))
    found.find_possible_followers(dict.fromkeys(range(ranks), 1.0), dict.fromkeys(range(ranks), 1))
    assert len(looked) == 2 * len(found.links)
