"""Comparing numbers among ranks: who has what, who is not there, and nobody waits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from forkpool import run_ranks

from msprobe_integrations.common.ranks.replica_channel import Difference
from msprobe_integrations.torch.ranks import replica_channel
from msprobe_integrations.torch.ranks.replica_channel import Channel

Check = dict[int, tuple[list[int], list[bool]]]
Answer = list[tuple[int, list[int] | None, list[bool] | None]]


def plain(differences: Sequence[Difference]) -> Answer:
    return [
        (d.place, None if d.digests is None else d.digests.tolist(), None if d.known is None else d.known.tolist()) for d in differences
    ]


def settle(channel: Channel, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not channel.idle and time.monotonic() < end:
        channel.poll()
        time.sleep(0.001)


def wait_for_group(channel: Channel, seconds: float = 30.0) -> None:
    """Until all have come, which they do by themselves."""
    end = time.monotonic() + seconds
    while not channel.connected and time.monotonic() < end:
        time.sleep(0.001)


def compare(*checks: Check) -> tuple[list[Answer], str]:
    """Answers of this rank, in order; a check is rank to (numbers, which are known)."""
    rank, size = dist.get_rank(), len(checks[0][0][0])
    channel = Channel(range(dist.get_world_size()), [f"tensor {i}" for i in range(size)])
    answers: list[Answer] = []
    for step, check in enumerate(checks):
        numbers, known = check[rank]
        channel.submit(step, np.array(numbers, np.int64), np.array(known), lambda found: answers.append(plain(found)))
    settle(channel)
    failed = channel.failed
    channel.close()
    return answers, failed


def everywhere(*numbers: list[int]) -> Check:
    return {rank: (mine, [True] * len(mine)) for rank, mine in enumerate(numbers)}


HIGH, LOW = (1 << 63) - 1, -(1 << 63)


def test_the_lowest_rank_learns_who_has_what() -> None:
    """Equal numbers are no difference, the smallest neither; of others the lowest rank gets everybody's, the rest their places."""
    differ, equal = everywhere([5, 7, LOW], [5, 8, LOW], [5, 7, LOW]), everywhere(*[[1, 2, 0]] * 3)
    first = run_ranks(3, compare, differ, equal)
    assert first[0] == ([[(1, [7, 8, 7], [True] * 3)], []], "")
    assert first[1] == first[2] == ([[(1, None, None)], []], "")


def test_extremes() -> None:
    """A difference between the smallest and the largest number, and one in the sign only, are differences."""
    ranks = run_ranks(2, compare, everywhere([LOW, -1, HIGH - 1], [HIGH - 1, 1, HIGH - 1]))
    assert [place for place, *_ in ranks[0][0][0]] == [0, 1]


def test_what_is_not_known_is_not_compared() -> None:
    """Numbers that a rank does not know are left out; known by one rank alone, or by nobody, they are no difference."""
    check = {
        0: ([1, 1, 1, 9], [True, True, False, False]),
        1: ([2, 1, 2, 8], [False, True, False, True]),
        2: ([3, 2, 3, 7], [True, False, True, False]),
    }
    assert run_ranks(3, compare, check)[0][0] == [[(0, [1, 2, 3], [True, False, True])]]


def test_of_many_differences_some_are_asked_for() -> None:
    """Of 100 tensors that differ the numbers of the first 64 are gathered; all 100 are told."""
    answer = run_ranks(2, compare, everywhere([1] * 100, [2] * 100))[0][0][0]
    assert [place for place, *_ in answer] == list(range(100))
    assert [digests is not None for _, digests, _ in answer] == [True] * 64 + [False] * 36


def apart() -> tuple[list[Answer], int]:
    """Rank 0 has steps 0, 2 and 4, rank 1 has 1, 3 and 4."""
    rank = dist.get_rank()
    channel = Channel([0, 1], ["a"])
    answers: list[Answer] = []
    for step in (rank, 2 + rank, 4):
        channel.submit(step, np.array([rank]), np.array([True]), lambda found: answers.append(plain(found)))
    settle(channel)
    left_out = sum(channel.left_out().values())
    channel.close()
    return answers, left_out


def test_different_steps_are_not_compared() -> None:
    """Steps that not all ranks have are left out and counted; the one that all have is compared."""
    first, second = run_ranks(2, apart)
    assert first == ([[(0, [0, 1], [True, True])]], 2)
    assert second == ([[(0, None, None)]], 2)


def absent() -> tuple[float, str, bool]:
    channel = Channel([0, 1], ["a"], patience=1.0)
    wait_for_group(channel)
    begin = time.monotonic()
    if dist.get_rank() == 0:
        for step in range(3):
            channel.submit(step, np.array([1]), np.array([True]), lambda _: None)
            channel.poll()
    took = time.monotonic() - begin
    settle(channel)
    dist.barrier()
    failed, idle = channel.failed, channel.idle
    channel.close()
    return took, failed, idle


def test_a_rank_that_does_not_answer() -> None:
    """The others do not wait for it; after the patience they say that they compare nothing any more."""
    (took, failed, idle), _ = run_ranks(2, absent)
    assert took < 0.5
    assert failed
    assert idle


def crowd() -> str:
    channel = Channel([0, 1], ["a"])
    wait_for_group(channel)
    dist.barrier()  # the other one has seen it, too, before this one gives up
    if dist.get_rank() == 0:
        for step in range(replica_channel.LIMIT + 2):
            channel.submit(step, np.array([1]), np.array([True]), lambda _: None)
    failed = channel.failed
    dist.barrier()
    channel.close()
    return failed


def test_checks_do_not_pile_up() -> None:
    """A rank that is alone gives up after some checks."""
    assert "did not all answer in 16 steps" in run_ranks(2, crowd)[0]


def unlike() -> str:
    channel = Channel([0, 1], ["a"] if dist.get_rank() else ["a", "b"])
    size = len(channel.contents)
    channel.submit(0, np.zeros(size, np.int64), np.ones(size, bool), lambda _: None)
    settle(channel)
    failed = channel.failed
    channel.close()
    return failed


def test_ranks_with_different_parameters_find_out_at_once() -> None:
    """Contents are compared before anything else; the message says what has to be the same."""
    assert all("do not hold copies of the same parameters" in text for text in run_ranks(2, unlike))


class _SlowToCount(Channel):
    def _miss_ranks(self, items: Sequence[Any], who: str) -> None:
        time.sleep(0.3)
        super()._miss_ranks(items, who)


def deserted() -> int:
    rank = dist.get_rank()
    channel = (Channel if rank else _SlowToCount)([0, 1], ["a"])
    wait_for_group(channel)
    dist.barrier()
    if rank == 0:
        for step in range(3):
            channel.submit(step, np.array([1]), np.array([True]), lambda _: None)
    dist.barrier()
    if rank:
        channel.close()
    settle(channel)
    left_out = sum(channel.left_out().values())
    dist.barrier()
    channel.close()
    return left_out


def test_checks_that_a_rank_leaves_behind_are_counted() -> None:
    """A check is under way until it is counted as one that was not made: whoever waits for the end of all misses none."""
    assert run_ranks(2, deserted)[0] == 3
