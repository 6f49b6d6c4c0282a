"""The replica check between ranks that share a directory only: who has what, old runs, ranks that differ or never come."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from msprobe_integrations.common.ranks.directory_channel import LONGEST_AT_END, PAUSE, DirectoryChannel, find_differences, pause_of
from msprobe_integrations.common.ranks.replica_channel import Difference

CONTENTS = ["a", "b", "c"]


def pair(directory: Path, ranks: tuple[int, ...] = (0, 1), patience: float = 60.0) -> list[DirectoryChannel]:
    """One channel per rank."""
    return [DirectoryChannel(directory, rank, ranks, CONTENTS, patience=patience) for rank in ranks]


def wait(channels: list[DirectoryChannel], seconds: float = 10.0) -> None:
    """Until nothing is under way."""
    until = time.monotonic() + seconds
    while any(not c.idle for c in channels) and time.monotonic() < until:
        for channel in channels:
            channel.poll()
        time.sleep(0.01)


def send(channel: DirectoryChannel, step: int, digests: list[int], found: list[list[Difference]], known: tuple[bool, ...] = ()) -> None:
    """One check."""
    channel.submit(step, np.array(digests, np.int64), np.array(known or (True,) * len(digests)), found.append)


def test_the_lowest_rank_learns_who_has_what(tmp_path: Path) -> None:
    """Equal tensors are no difference; of others the lowest rank gets the digests of all, and nobody else is told."""
    channels = pair(tmp_path / "replicas", (0, 2, 5))
    found: list[list[list[Difference]]] = [[], [], []]
    for step in range(3):
        for i, channel in enumerate(channels):
            send(channel, step, [1, 2, 7 if step == 1 and i == 2 else 3], found[i])
    wait(channels)
    assert [len(f) for f in found] == [3, 0, 0]
    assert found[0][0] == found[0][2] == []
    (difference,) = found[0][1]
    assert difference.place == 2
    assert difference.digests is not None
    assert difference.digests.tolist() == [3, 3, 7]
    for channel in channels[::-1]:
        channel.close()
    assert not (tmp_path / "replicas").exists()


def test_looks_of_a_group_have_a_bound(tmp_path: Path) -> None:
    """The more ranks a group has the longer each pauses: together they look no more often than 16 ranks, until the end of the run waits."""
    assert {round(ranks / pause_of(ranks)) for ranks in (16, 64, 10_240)} == {320}
    assert pause_of(2) == pause_of(16) == PAUSE
    channels = pair(tmp_path, (0, 1))
    channels[1].ranks = list(range(10_240))
    assert channels[1]._pause() == pause_of(10_240)
    send(channels[1], 0, [1, 2, 3], [])
    time.sleep(0.2)  # it has written its file, and pauses for half a minute
    send(channels[0], 0, [1, 2, 3], [])
    wait(channels[:1])
    assert channels[1].under_way
    channels[1].hurry()
    assert channels[1]._pause() == LONGEST_AT_END
    wait(channels[1:], 4 * LONGEST_AT_END)
    assert channels[1].idle
    for channel in channels:
        channel.close()


def test_a_rank_does_not_wait_for_one_that_has_closed(tmp_path: Path) -> None:
    """When the lowest rank takes its files away the checks of the others are over: of the last one, and of one that only they began."""
    leader, follower = pair(tmp_path / "replicas")
    found: list[list[Difference]] = []
    for channel in (leader, follower):
        send(channel, 0, [1, 2, 3], found)
    wait([leader])
    leader.close()
    send(follower, 1, [1, 2, 3], found)
    wait([follower])
    assert follower.idle
    assert not follower.failed
    assert found == [[]]
    follower.close()


def test_a_rank_that_leaves_or_never_came_is_named(tmp_path: Path) -> None:
    """The lowest rank does not wait for one that has closed, says which one it was, and compares again with a new one in its place; at
    the end of the run one that never came is waited for a little only."""
    leader, follower = pair(tmp_path / "replicas")
    found: list[list[Difference]] = []
    for channel in (leader, follower):
        send(channel, 0, [1, 2, 3], found)
    wait([leader, follower])
    follower.close()
    send(leader, 1, [1, 2, 3], found)
    wait([leader])
    assert leader.left_out() == {"rank 1: its probe was closed": 1}
    again = DirectoryChannel(tmp_path / "replicas", 1, (0, 1), CONTENTS)
    send(again, 2, [1, 2, 3], found)
    while list((tmp_path / "replicas").glob("*/*.left.*")):  # it is taken back with the first answer
        time.sleep(0.01)
    send(leader, 2, [1, 2, 3], found)
    wait([leader, again])
    assert found == [[], []]
    assert not leader.left_out()
    alone = DirectoryChannel(tmp_path / "alone", 0, (0, 1), CONTENTS)
    send(alone, 0, [1, 2, 3], found)
    alone.hurry()
    wait([alone])
    assert alone.left_out() == {"rank 1: it has no probe, or one whose settings leave this out": 1}
    for channel in (leader, again, alone):
        assert not channel.failed
        channel.close()


def test_what_is_not_known_is_not_compared() -> None:
    """A rank that has no digest of a tensor makes no difference; two others that have different ones do."""
    digests = np.array([[1, 5, 0], [2, 5, 4], [1, 6, 4]])
    known = np.array([[True, True, False], [False, True, True], [True, True, True]])
    assert [d.place for d in find_differences(digests, known)] == [1]


def test_an_earlier_run_is_not_read(tmp_path: Path) -> None:
    """What a run that was killed has left, its token and its numbers, is not taken for those of this run: whoever comes first."""
    old = pair(tmp_path)
    lost: list[list[Difference]] = []
    send(old[1], 0, [9, 9, 9], lost)
    time.sleep(0.2)  # written, and nobody reads it
    old[1]._closed = old[0]._closed = True
    follower = DirectoryChannel(tmp_path, 1, (0, 1), CONTENTS)
    found: list[list[Difference]] = []
    send(follower, 0, [1, 2, 3], lost)
    time.sleep(0.2)  # under the old token
    leader = DirectoryChannel(tmp_path, 0, (0, 1), CONTENTS)
    send(leader, 0, [1, 2, 3], found)
    wait([leader, follower])
    assert found == [[]]
    assert follower.idle
    follower.close()
    leader.close()


def test_other_parameters_and_ranks_that_never_come(tmp_path: Path) -> None:
    """Ranks that compare different things are said; so is one that never answers, after a while, and nothing waits for it."""
    leader = DirectoryChannel(tmp_path / "one", 0, (0, 1), CONTENTS)
    other = DirectoryChannel(tmp_path / "one", 1, (0, 1), ["a", "b", "d"])
    for channel in (leader, other):
        send(channel, 0, [1, 2, 3], [])
    wait([leader])
    assert "do not hold copies of the same parameters" in leader.failed
    alone = DirectoryChannel(tmp_path / "two", 0, (0, 1), CONTENTS, patience=0.2)
    send(alone, 0, [1, 2, 3], [])
    wait([alone])
    assert "did not all answer" in alone.failed
    for channel in (leader, other, alone):
        channel.close()
