"""A rank of the tree is killed (``kill -9``) in the midst of an exchange, with real ranks: nobody is held, and what is lost is said.

It dies with step `LAST` half exchanged: on the word of a rank below it, or, as a leaf, before it says its own. What was answered before
stays merged, no step from there on is, and every rank says which one cannot be reached.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from log_lines import heard

from msprobe_engine.core.statistics import rows as R
from msprobe_integrations.common.ranks.tree import SELF, Kind, Lane, Sent, shape_of
from msprobe_integrations.torch.ranks.merge import MergeFailed, RowExchange
from msprobe_integrations.torch.ranks.replica_channel import Channel

pytestmark = pytest.mark.framework
RANKS, STEPS, LAST = 12, 10, 5
BOUND = 10.0
"""Seconds until it is known of every step whether it is merged; a second of them is waited for a word of the rank in the job's store."""
STEP_SECONDS = 0.05


class Seen(NamedTuple):
    """What came of a rank that lives.

    Attributes:
        slowest: seconds that a step spent on giving its numbers away and looking at answers.
        wait: seconds until it was known of every step whether it is merged.
        merged: steps.
        compared: steps of the check of replicas that were told.
        left_out: how many of them were not.
        failed: the check has ended.
        said: why rows or checks are left out.
    """

    rank: int
    slowest: float
    wait: float
    merged: list[int]
    compared: list[int]
    left_out: int
    failed: bool
    said: list[str]


def _die_in(step: int, leaf: bool) -> None:
    receive = Lane.receive

    def dies(lane: Lane, source: int, message: Any) -> Sent:
        if message.number == step and message.kind is Kind.UP and (source == SELF) == leaf:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return receive(lane, source, message)

    Lane.receive = dies  # type: ignore[method-assign]


def _rank(rank: int, victim: int, init: str, answers: Any, living: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=RANKS)
    said = heard()
    exchange, channel = RowExchange(), Channel(range(RANKS), ["a", "b"])
    while not (exchange.connected and channel.connected):
        time.sleep(0.005)
    dist.barrier()
    if rank == victim:
        _die_in(LAST, not CHILDREN[rank])
    merges, compared, slowest = [], list[int](), 0.0
    for step in range(STEPS):
        rows = R.empty(1)
        began = time.monotonic()
        merge = exchange.merge(step, ["a"], [0], [{}])
        merge.start(rows)
        channel.submit(step, np.array([1, 2]), np.ones(2, bool), lambda _, step=step: compared.append(step))
        channel.poll()
        slowest = max(slowest, time.monotonic() - began)
        merges.append((merge, rows))
        time.sleep(STEP_SECONDS)  # the training computes
    began = time.monotonic()
    for merge, rows in merges:
        merge.wait(30)
        try:
            merge.apply(rows)
        except MergeFailed as error:
            said.append(str(error))
    while channel.under_way and time.monotonic() < began + 30:
        channel.poll()
        time.sleep(0.01)
    wait = time.monotonic() - began
    merged = [step for step, (merge, _) in enumerate(merges) if merge.merged is not None]
    left_out = channel.left_out()
    told = [*said, channel.failed, *left_out]
    answers.put(Seen(rank, slowest, wait, merged, compared, sum(left_out.values()), bool(channel.failed), told))
    living.wait(30)  # who closes says something else
    exchange.close()
    channel.close()


CHILDREN = [shape_of(range(RANKS), place).children for place in range(RANKS)]
INNER = next(place for place in range(1, RANKS) if CHILDREN[place])


@pytest.mark.fast_cells("the root")
@pytest.mark.parametrize("victim", [0, INNER, pytest.param(RANKS - 1, marks=pytest.mark.slow)], ids=["the root", "between", "a leaf"])
def test_a_rank_killed_in_the_midst_of_an_exchange(victim: int) -> None:
    """The rule above, for a rank at each place in the tree."""
    context = multiprocessing.get_context("fork")
    answers, living = context.Queue(), context.Barrier(RANKS - 1)
    with tempfile.TemporaryDirectory() as place:
        shared = victim, f"{place}/init", answers, living
        processes = [context.Process(target=_rank, args=(rank, *shared), daemon=True) for rank in range(RANKS)]
        for process in processes:
            process.start()
        seen: list[Seen] = []
        with contextlib.suppress(queue.Empty):
            while len(seen) < RANKS - 1:
                seen.append(answers.get(timeout=240))
        for process in processes:
            process.join(30)
            process.kill()
    assert sorted(one.rank for one in seen) == [rank for rank in range(RANKS) if rank != victim]
    assert processes[victim].exitcode == -signal.SIGKILL
    assert {process.exitcode for process in processes} == {0, -signal.SIGKILL}
    print(f"slowest step {max(one.slowest for one in seen):.3f} s, all known {max(one.wait for one in seen):.1f} s behind the last step")
    for one in seen:
        assert one.slowest < BOUND / 10
        assert one.wait < BOUND
        assert one.merged == list(range(len(one.merged)))
        assert len(one.merged) <= LAST
        assert one.compared == list(range(len(one.compared)))
        assert len(one.compared) <= LAST
        assert one.failed or len(one.compared) + one.left_out == STEPS
        about = [text for text in one.said if f"(rank {victim}" in text and "has ended or cannot be reached" in text]
        assert any("statistics of sharded tensors" in text for text in about)
        assert any("statistics of sharded tensors" not in text for text in about)
