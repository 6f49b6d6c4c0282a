"""What ranks tell each other step by step, in the background, along a tree of them: rows of shards, digests of replicas, numbers of all
ranks beside each other, votes. This is the one exchange of the probe; what is exchanged is said by its subclasses.

Nothing here is done or waited for on the training's thread: it puts items into the line and looks at what has become of them. One thread
per process (`links`) says that this rank takes part, connects it to its neighbours once all have come (`members`), and passes on what they
send (`tree`), so that ranks get on with each other also while their trainings are held in a collective.

Why no process group: a collective waits for all, ends the process when messages of different lengths meet, and connects every rank with
every other. Here ranks may disagree about what a step holds (settings that changed one step later on one of them, a rank that is paused, or
has attached later): what they do not all have is left apart, and the next steps are exchanged again. Every rank gets the same answers.

When a rank leaves (its probe is closed, or a fault has switched its part off) the others hear it along the tree, let go of what is under
way, and wait for it to come again without exchanging anything.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from msprobe_integrations.common.ranks.exchange_thread import CLOSED, LOST, ExchangeThread, running
from msprobe_integrations.common.ranks.tree import Words

ABSENT = 10.0
"""Seconds, from the first item on, after which ranks that have not come are said to take no part. Only frames wait for them so long: a rank
that computes steps with this one has attached its probe by then."""
ABSENT_AT_END, LEAST_AT_END = 2.0, 0.3
"""The same where the end of the run waits for it, and how long it waits at least: by then all ranks have computed their
steps, and one that takes part has said so when its probe was attached."""
_FURTHER = 4
"""So many times the limit may wait in line until it is known which ranks have not come."""
_END = 3.0
"""Seconds that the end of the process gives exchanges to say that they leave."""


class Item(Protocol):
    """What waits in the line.

    Attributes:
        lane, number, identity: as of `Message`; the number is that of its step.
        apart: why it will not be exchanged; empty as long as it may.
        missing: it is because ranks take no part.
    """

    lane: int
    number: int
    identity: int
    apart: str
    missing: bool

    def words(self) -> Words:
        """What this rank has."""
        ...


class StepExchange(ExchangeThread):
    """A line of items that some ranks exchange; all methods without an underscore are the training's and never wait.

    Args:
        ranks: global ranks, the same list on all of them, this one among it.
        purpose: what it is for, in one word; ranks meet by it.
        limit: items that may wait in line; more mean that a rank is silent.

    Attributes:
        failed: why nothing is exchanged any more; empty as long as it may be.
        missing: which ranks take no part now, and why; empty as long as all do, or may be about to.
        trouble: why a rank cannot be reached, until it is known whether it has left; then it goes on, or has failed.
        leader: this is the first of the ranks.

    Raises:
        RuntimeError: this process may not open so many files.
    """

    def submit(self, item: Item) -> None:
        """Take `item` into the line."""
        too_old: Any = None
        too_many = False
        action: Callable[[], None] = partial(self._begin_item, item)
        with self._lock:
            missing = self.missing
            if self.failed:
                return
            if not missing:
                if not self._queue:
                    self._since = time.monotonic()
                self._queue.append(item)
                waiting = len(self._queue)
                if self.connected:
                    too_many = waiting > self._limit + self._backlog
                elif waiting > self._limit:
                    self._absent_at, action = min(self._absent_at, time.monotonic()), self._do_pending_work
                    too_old = self._queue.popleft() if waiting > _FURTHER * self._limit else None
                elif not self._absent_at:
                    self._absent_at, action = time.monotonic() + ABSENT, self._do_pending_work
        if missing:
            self._miss_ranks([item], missing)
            return
        if too_old is not None:
            self._leave_apart(too_old, f"not all of them had come {_FURTHER * self._limit} steps later")
        if too_many:
            self.fail(f"ranks {self.ranks} did not all answer in {self._limit} steps: is the probe off on one of them?")
            return
        self._loop.call(action)

    @property
    def under_way(self) -> int:
        """Items that have no result yet; none of an exchange that has failed."""
        with self._lock:
            return 0 if self.failed else len(self._queue) + self._answering

    def silent_for(self, seconds: float) -> bool:
        """Has what all ranks have come for had no answer for so long?"""
        return self.connected and bool(self._queue) and time.monotonic() > self._since + seconds

    def meet(self, seconds: float) -> bool:
        """Wait until all ranks have come, at most so long; whoever has not is `missing` then, as far as the store answers in time."""
        self._absent_at = time.monotonic() + seconds
        end = self._absent_at + LOST
        self._loop.call(self._do_pending_work)
        while not (self.connected or self.missing or self.failed) and time.monotonic() < end:
            time.sleep(0.002)
        return self.connected

    def hurry(self) -> None:
        """The end of the run waits for ranks that have not come."""
        soon = max(self._absent_at - ABSENT + ABSENT_AT_END, time.monotonic() + LEAST_AT_END)
        if not self.connected and self._absent_at > soon:
            self._absent_at = soon
            self._loop.call(self._do_pending_work)

    def close(self, why: str = CLOSED) -> None:
        self._why = self._why or why
        self._members.give_up_place()
        self.fail("closed")


def _at_exit() -> None:
    """Other ranks hear that this one leaves, as far as that takes no longer than `_END`."""
    end = time.monotonic() + _END
    exchanges = list(running)
    for exchange in exchanges:
        exchange.close()
    for exchange in exchanges:
        exchange._ended.wait(max(0.0, end - time.monotonic()))
    for loop in {exchange._loop for exchange in exchanges}:
        loop.join(max(0.0, end - time.monotonic()))


os.register_at_fork(after_in_child=running.clear)  # the threads are the parent's
atexit.register(_at_exit)  # before any probe has registered its end, so that this comes last
