"""What ranks tell each other step by step, in the background: which of the waiting steps all of them have, and then what those are about.

Nothing here is done or waited for on the training's thread: it puts items into the line and looks at what has become of them. A thread per
exchange says that this rank takes part, builds the group once all have come (`group_members`), and drives what is under way, so that
ranks get on with each other also while their trainings are held in a collective.

Why first an agreement: gloo ends the process when messages of different lengths meet, and ranks may disagree about what a step holds
(settings that changed one step later on one of them, a rank that is paused, or has attached later). So contents travel only after a
small message of fixed length has said that all ranks have the same ones waiting. What they do not all have is left apart; the next steps
are exchanged again. Every rank sees the same results, and so does the same exchanges in the same order.

When a rank leaves (its probe is closed, or a fault has switched its part off) the others hear it from the store, or from gloo, let go of
what is under way, and wait for it to come again without exchanging anything.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger
from msprobe_integrations.torch.ranks.group_members import LEFT, VOID, Members, describe_others
from msprobe_integrations.torch.ranks.own_group import OwnGroup, check_gloo, take_apart

ABSENT = 10.0
"""Seconds, from the first item on, after which ranks that have not come are said to take no part. Only frames wait for them so long: a rank
that computes steps with this one has attached its probe by then."""
ABSENT_AT_END, LEAST_AT_END = 2.0, 0.3
"""The same where the end of the run waits for it, and how long it waits at least: by then all ranks have computed their
steps, and one that takes part has said so when its probe was attached."""
LONGEST = 1800.0
"""Seconds after which the transport gives up. A rank that writes a checkpoint for minutes is no fault."""
SILENCE = 0.5
"""Seconds without an answer after which, and every so many from then on, the store is asked whether a rank has left."""
_FURTHER = 4
"""So many times the limit may wait in line until it is known which ranks have not come."""
SLOTS = 8
"""Steps that one agreement is about."""
CLOSED = "its probe was closed"
_END = 3.0
"""Seconds that the end of the process gives exchanges to say that they leave."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02
_LONGEST_MEETING_PAUSE = 5.0
_NOTHING = np.iinfo(np.int64).min
Words = npt.NDArray[np.int64]
_STORE_ERRORS = tuple(getattr(dist, name) for name in ("DistNetworkError", "DistStoreError") if hasattr(dist, name))
_log = get_logger()
_running: set[StepExchange] = set()


class Item(Protocol):
    """What waits in the line.

    Attributes:
        number: of its step.
        identity: equal on ranks whose items belong together.
        apart: why it will not be exchanged; empty as long as it may.
        missing: it is because ranks take no part.
    """

    number: int
    identity: int
    apart: str
    missing: bool


class Flight:
    """One exchange under way.

    Attributes:
        works: of gloo.
        items: that are in the line no more and depend on it.
    """

    works: Sequence[Any] = ()
    items: Sequence[Any] = ()

    def done(self) -> bool:
        """Has it ended?"""
        return all(work.is_completed() for work in self.works)

    def next(self) -> Flight | None:
        """Take its result over, and what follows. Raises what the transport raised."""
        for work in self.works:
            work.wait()
        return self._follow()

    def _follow(self) -> Flight | None:
        raise NotImplementedError


class StepExchange:
    """A line of items that some ranks exchange; all methods without an underscore are the training's and never wait.

    Args:
        ranks: global ranks, the same list on all of them, this one among it.
        purpose: what it is for, in one word; ranks meet by it.
        limit: items that may wait in line; more mean that a rank is silent.

    Attributes:
        failed: why nothing is exchanged any more; empty as long as it may be.
        missing: which ranks take no part now, and why; empty as long as all do, or may be about to.
        trouble: what the transport has said, until it is known whether a rank has left; then it goes on, or has failed.
        leader: this is the first of the ranks.
    """

    def __init__(self, ranks: Sequence[int], purpose: str, limit: int) -> None:
        check_gloo(len(ranks))
        self.ranks = list(ranks)
        self.failed = ""
        self.missing = ""
        self.trouble = ""
        self.leader = dist.get_rank() == self.ranks[0]
        self.group: OwnGroup | None = None
        self._place = self.ranks.index(dist.get_rank())
        self._limit = limit
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._queue: deque[Any] = deque()
        self._flight: Flight | None = None
        self._since = 0.0
        self._absent_at = 0.0
        self._backlog = 0
        self._why = ""
        self._process_ends = False
        store: Any = distributed_c10d._get_default_store()
        self._members = Members(store, purpose, self.ranks, dist.get_rank())
        self._thread = threading.Thread(target=self._work, name=f"msprobe-{purpose}", daemon=True)
        _running.add(self)
        self._thread.start()

    def submit(self, item: Item) -> None:
        """Take `item` into the line."""
        too_old: Any = None
        too_many = False
        with self._lock:
            missing = self.missing
            if self.failed:
                return
            if not missing:
                self._queue.append(item)
                waiting = len(self._queue)
                if self.group is not None:
                    too_many = waiting > self._limit + self._backlog
                elif waiting > self._limit:
                    self._absent_at = min(self._absent_at, time.monotonic())
                    too_old = self._queue.popleft() if waiting > _FURTHER * self._limit else None
                else:
                    self._absent_at = self._absent_at or time.monotonic() + ABSENT
        if missing:
            self._miss_ranks([item], missing)
            return
        if too_old is not None:
            self._leave_apart(too_old, f"not all of them had come {_FURTHER * self._limit} steps later")
        if too_many:
            self.fail(f"ranks {self.ranks} did not all answer in {self._limit} steps: is the probe off on one of them?")
        self._wake.set()

    @property
    def under_way(self) -> int:
        """Items that have no result yet; none of an exchange that has failed."""
        with self._lock:
            return 0 if self.failed else len(self._queue) + (len(self._flight.items) if self._flight is not None else 0)

    def hurry(self) -> None:
        """The end of the run waits for ranks that have not come."""
        soon = max(self._absent_at - ABSENT + ABSENT_AT_END, time.monotonic() + LEAST_AT_END)
        if self.group is None and self._absent_at > soon:
            self._absent_at = soon
            self._wake.set()

    def fail(self, why: str) -> None:
        """Nothing is exchanged any more, and the other ranks hear of it."""
        with self._lock:
            self.failed = self.failed or why
            self._queue.clear()
        self._why = self._why or why
        self._wake.set()

    def close(self, why: str = CLOSED) -> None:
        """Leave; does not wait for ranks that do not answer.

        Args:
            why: what the other ranks say of this one.
        """
        self._why = self._why or why
        self._members.give_up_place()
        self.fail("closed")

    def _start(self, items: Sequence[Any]) -> Flight | None:
        """Exchange what all ranks have; the first of what follows."""
        raise NotImplementedError

    def _leave_apart(self, item: Any, why: str, /) -> None:
        """An item that not all ranks have will not be exchanged. Called on either thread."""
        item.apart = why

    def _miss_ranks(self, items: Sequence[Any], who: str) -> None:
        """Items will not be exchanged because ranks take no part. Called on either thread."""
        for item in items:
            item.missing, item.apart = True, who

    def _differ(self, item: Any, /) -> None:
        """Ranks have different contents for one step."""
        self._leave_apart(item, "the same step holds different things; monitor settings have to be the same on all ranks")

    # the thread

    def _work(self) -> None:
        store_is_gone = False
        try:
            while not self.failed:
                self._meet()
                if self.group is not None:
                    self._drive(self.group)
        except Exception as error:
            store_is_gone = isinstance(error, _STORE_ERRORS)
            self.fail(_first_words(error))
        try:
            if not store_is_gone and self._members.leave(self._why or self.failed) and self.group is None and not self._process_ends:
                self.group = self._connect()  # the others build it too, and this rank was counted
        except Exception as error:
            _log.debug("leaving a group of ranks: %s: %s", type(error).__name__, error)
        self._let_go()
        _running.discard(self)

    def _connect(self) -> OwnGroup:
        return OwnGroup(self._members.rendezvous(lambda: self._process_ends), self._place, len(self.ranks), LONGEST)

    def _meet(self) -> None:
        """Until all ranks have come, or this one leaves."""
        self._members.arrive()
        began = time.monotonic()
        while not self.failed:
            state = self._members.state()
            if state & VOID:
                self._members.arrive()
            elif state:
                try:
                    group = self._connect()
                except Exception:
                    if not self._members.state() & LEFT:
                        raise
                    self._part()
                    continue
                with self._lock:
                    self.group, came, self.missing, self._absent_at = group, bool(self.missing), "", 0.0
                    self._backlog = len(self._queue)
                if came:
                    _log.info("ranks %s all take part now: what they exchange is whole from here on", self.ranks)
                return
            now = time.monotonic()
            if self._absent_at and now > self._absent_at and not self.missing:
                self._miss(describe_others(self._members.others()) or "not all of them have come")
            pause = min(_LONGEST_MEETING_PAUSE, 0.002 + (now - began) / 10)
            if self._absent_at and not self.missing:
                pause = min(pause, 0.05)
            self._wake.wait(pause)
            self._wake.clear()

    def _miss(self, why: str, on_their_way: Sequence[Any] = ()) -> None:
        with self._lock:
            self.missing = why
            items = [*on_their_way, *self._queue]
            self._queue.clear()
        self._miss_ranks(items, why)

    def _part(self) -> None:
        """A member has left: this rank meets the others again when all have come anew."""
        on_their_way = [] if self._flight is None else self._flight.items
        self._let_go()
        self._miss(describe_others(self._members.others()) or CLOSED, on_their_way)
        self._members.end_generation()

    def _drive(self, group: OwnGroup) -> None:
        """Until this rank leaves, or another one has."""
        pause: float | None = 0.0
        asked = 0.0
        while not self.failed:
            self._wake.wait(pause)
            self._wake.clear()
            try:
                moved = self._advance(group)
                error = ""
            except UsageError:
                raise
            except Exception as problem:
                moved, error = False, _first_words(problem)
            now = time.monotonic()
            if self._flight is None:
                pause = None
                continue
            pause = _FIRST_PAUSE if moved or pause is None else min(2 * pause, _LONGEST_PAUSE)
            if moved:
                asked = now
            if error or now > asked + SILENCE:
                asked = now
                if error:
                    self.trouble = f"one of the ranks {self.ranks} has ended or cannot be reached ({error})"
                if self._has_left(1.0 if error else 0.0):
                    self._part()
                    return
                if error:
                    raise RuntimeError(self.trouble)

    def _has_left(self, seconds: float) -> bool:
        """Has a member left? What it has sent before may be on its way still, so its answers are waited for a little."""
        end = time.monotonic() + seconds
        while not (left := self._members.state() & LEFT) and time.monotonic() < end:
            time.sleep(_LONGEST_PAUSE)
        if not left or seconds:
            return bool(left)
        until = time.monotonic() + SILENCE
        while time.monotonic() < until:
            if self._flight is not None and self._flight.done():
                return False
            time.sleep(_LONGEST_PAUSE)
        return True

    def _advance(self, group: OwnGroup) -> bool:
        """Go on with what has arrived; True when something has. Raises what went wrong."""
        moved = False
        while not self.failed:
            flight = self._flight
            if flight is None:
                with self._lock:
                    items = list(islice(self._queue, SLOTS))
                if not items:
                    return moved
                self._flight = _Agreement(self, group, items)
            elif not flight.done():
                return moved
            else:
                self._flight = flight.next()
            self._since = time.monotonic()
            moved = True
        return moved

    def _agreed(self, low: Words, high: Words) -> Flight | None:
        same = (low == high).all(1) & (low[:, 1] != _NOTHING)
        count = len(same) if same.all() else int(np.argmin(same))
        newest, other, older = int(high[0, 0]), None, []
        with self._lock:
            if self.failed:
                return None
            items = [self._queue.popleft() for _ in range(count)]
            if self._flight is not None:
                self._flight.items = items
            if not count:
                other = self._queue.popleft() if low[0, 0] == newest else None
                while self._queue and self._queue[0].number < newest:
                    older.append(self._queue.popleft())
        if count:
            return self._start(items)
        if other is not None:
            self._differ(other)
        for item in older:
            self._leave_apart(item, "some ranks have nothing of this step; the probe has to be driven alike on all of them")
        return None

    def _let_go(self) -> None:
        """Take the group apart."""
        flight, self._flight = self._flight, None
        group, self.group = self.group, None
        if group is not None:
            group.close([] if flight is None else [flight])


def _first_words(error: Exception) -> str:
    """What the transport or the store says, without the trace of its own code and what it advises."""
    text = str(error).strip().split("\n", 1)[0].split(". ", 1)[0] or type(error).__name__
    if isinstance(error, _STORE_ERRORS):
        return f"the job's store cannot be reached ({text}): the rank that holds it, usually rank 0, has ended"
    return text


class _Agreement(Flight):
    """Which of the steps in the line do all ranks have? For each slot the smallest and the largest number of a step and its contents."""

    def __init__(self, exchange: StepExchange, group: OwnGroup, items: Sequence[Item]) -> None:
        words = np.full((SLOTS, 2), _NOTHING, np.int64)
        for i, item in enumerate(items):
            words[i] = item.number, item.identity
        self._exchange = exchange
        self._words = torch.from_numpy(np.stack([words, ~words]))
        self.works = [group.all_reduce(self._words, dist.ReduceOp.MIN)]

    def _follow(self) -> Flight | None:
        words = self._words.numpy()
        return self._exchange._agreed(words[0], ~words[1])


def _at_exit() -> None:
    """Other ranks hear that this one leaves, as far as that takes no longer than `_END`; no thread of ours is left in native code."""
    end = time.monotonic() + _END
    for exchange in list(_running):
        exchange.close()
    for exchange in list(_running):
        exchange._thread.join(max(0.0, end - time.monotonic()))
    for exchange in list(_running):
        exchange._process_ends = True
        exchange._thread.join(0.5)
    take_apart(last=True)


os.register_at_fork(after_in_child=_running.clear)  # the threads are the parent's
atexit.register(_at_exit)  # before any probe has registered its end, so that this comes last
