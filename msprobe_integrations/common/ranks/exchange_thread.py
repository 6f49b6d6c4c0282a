"""The thread of an exchange: meets the other ranks, passes on what they send, and hears who has left. What the training asks of an
exchange is in `step_exchange`."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger
from msprobe_engine.probe.incident.notify import Store
from msprobe_integrations.common.ranks.connections import Loop, join_loop
from msprobe_integrations.common.ranks.links import Links
from msprobe_integrations.common.ranks.members import LEFT, VOID, Members
from msprobe_integrations.common.ranks.tree import SELF, Kind, Lane, Message, Sent, Words, shape_of

LOST = 1.0
"""Seconds that are waited for a word in the store of a rank that cannot be reached any more."""
CLOSED = "its probe was closed"
_LONGEST_PAUSE = 5.0
_LOOKS_PER_SECOND = 20_000
"""Of all ranks of a group together into the store, as long as members are missing."""
_FILES = 12
"""Files that an exchange leaves to the training, at least."""
_STORE_ERRORS = ("DistNetworkError", "DistStoreError")
_log = get_logger()
running: set[Any] = set()
"""Exchanges of this process that have not ended."""


class Phase(Enum):
    MEETING = 1
    CONNECTED = 2
    BROKEN = 3
    ENDED = 4


class ExchangeThread:
    """See `step_exchange.StepExchange`, which the training uses. Methods with an underscore run on the thread, unless they say so."""

    def __init__(self, store: Store, ranks: Sequence[int], rank: int, purpose: str, limit: int) -> None:
        self.ranks = list(ranks)
        self._place = self.ranks.index(rank)
        self._shape = shape_of(self.ranks, self._place)
        _check_files(len(self.ranks), len(self._shape.children) + 1)
        self.failed = ""
        self.missing = ""
        self.trouble = ""
        self.leader = self._place == 0
        self._limit = limit
        self._lock = threading.Lock()
        self._queue: deque[Any] = deque()
        self._begun: list[Any] = []
        self._since = 0.0
        self._absent_at = 0.0
        self._backlog = self._answering = 0
        self._why = ""
        self._store = store
        self._members = Members(store, purpose, self.ranks, rank)
        self._phase = Phase.MEETING
        self._ended = threading.Event()
        self._turn_number = 0
        self._met_at = self._broken_at = 0.0
        self._lanes: list[Lane] = []
        self._links: Links | None = None
        running.add(self)
        self._loop: Loop = join_loop(self)
        self._loop.call(self._do_pending_work)

    @property
    def connected(self) -> bool:
        """All ranks have come and none has left."""
        return self._phase is Phase.CONNECTED

    def fail(self, why: str) -> None:
        """Nothing is exchanged any more, and the other ranks hear of it."""
        with self._lock:
            self.failed = self.failed or why
            self._queue.clear()
        self._why = self._why or why
        if self._phase is not Phase.ENDED:
            self._loop.call(self._do_pending_work)

    def _make_lanes(self) -> list[Lane]:
        """How what the ranks have is merged."""
        raise NotImplementedError

    def _receive(self, item: Any, words: Words) -> None:
        """The answer to an item. On the thread of the exchange."""
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

    # on the thread

    def _do_pending_work(self) -> None:
        """Look what there is to do, and say when to look again."""
        self._turn_number += 1
        number = self._turn_number
        pause: float | None = None
        try:
            if self._phase is Phase.ENDED:
                return
            if self.failed:
                self._end_exchange()
            elif self._phase is Phase.MEETING:
                pause = self._meet()
            elif self._phase is Phase.BROKEN:
                pause = self._look_who_left()
        except Exception as error:
            self._break_off(error)
            return
        if pause is not None:
            self._loop.later(pause, lambda: self._do_pending_work() if number == self._turn_number else None)

    def _break_off(self, error: Exception) -> None:
        why = str(error) if isinstance(error, UsageError) else self._first_words(error)
        self._why = self._why or why
        self.fail(why)

    def _meet(self) -> float | None:
        """One look whether all ranks have come; seconds until the next."""
        now = time.monotonic()
        self._met_at = self._met_at or now
        spread = len(self.ranks) / _LOOKS_PER_SECOND
        address = self._loop.address(_host_of(self._store)) if self._shape.children else ""
        if not self._members.arrive(address):
            return 0.01
        state = self._members.state()
        if state and not state & VOID:
            self._connect()
            return None
        if state:
            self._members.arrive(address)
        waits_for_answer = False
        if self._absent_at and now > self._absent_at and not self.missing:
            who = self._members.others("absent")
            waits_for_answer = who is None
            if who is not None:
                self._miss(who or "not all of them have come")
        pause = min(_LONGEST_PAUSE, 0.002 + (now - self._met_at) / 10)
        if self._absent_at and not self.missing:
            pause = min(pause, 0.05 if waits_for_answer else max(0.002, min(0.05, self._absent_at - now)))
        return max(pause, spread)

    def _connect(self) -> None:
        self._lanes = self._make_lanes()
        self._links = Links(self._loop, self._members.key(), self._place, self._shape.children, self._heard, self._lose)
        with self._lock:
            came, self.missing, self._absent_at = bool(self.missing), "", 0.0
            self._phase, self._met_at = Phase.CONNECTED, 0.0
            self._backlog, self._since = len(self._queue), time.monotonic()
            items = list(self._queue)
        if came:
            _log.info("ranks %s all take part now: what they exchange is whole from here on", self.ranks)
        for item in items:
            self._begin_item(item)
        parent = self._shape.parent
        if parent >= 0 and (address := self._members.address(self.ranks[parent])):
            self._links.reach(parent, address)
        elif parent >= 0:
            self._lose(parent, "it has left")

    def _begin_item(self, item: Any) -> None:
        """Tell the others what this rank has; what waits until all have come is begun then."""
        with self._lock:
            begins = self.connected and item in self._queue and item not in self._begun
        if begins:
            self._begun.append(item)
            try:
                self._spread(self._lanes[item.lane].receive(SELF, Message(Kind.UP, item.lane, item.number, item.identity, item.words())))
            except Exception as error:
                self._break_off(error)

    def _spread(self, sent: Sent) -> None:
        for place, message in sent:
            if self._links is None:
                return
            if place == SELF:
                self._handle_answer(message)
            else:
                self._links.send(place, message)

    def _heard(self, place: int, message: Message) -> None:
        try:
            if message.kind is Kind.LEFT:
                self._hear_of_leaver(place, message)
            elif message.lane < len(self._lanes):
                self._spread(self._lanes[message.lane].receive(place, message))
        except Exception as error:
            self._break_off(error)

    def _handle_answer(self, message: Message) -> None:
        lane, number, identity = message.lane, message.number, message.identity
        alike = message.kind is not Kind.UNLIKE
        with self._lock:
            waiting = (each for each in self._begun if (each.lane, each.number) == (lane, number))
            item = next((each for each in waiting if not alike or each.identity == identity), None)
            if item is None:
                return
            self._queue.remove(item)
            self._begun.remove(item)
            self._backlog = max(0, self._backlog - 1)
            self._since = time.monotonic()
            self._answering = 1
        if message.kind is Kind.ANSWER:
            self._receive(item, message.words)
        elif message.kind is Kind.UNLIKE:
            self._differ(item)
        else:
            self._leave_apart(item, "some ranks have nothing of this step; the probe has to be driven alike on all of them")
        self._answering = 0

    def _tell_neighbours(self, rank: int, why: str, apart_from: int = SELF) -> None:
        words = np.frombuffer(why.encode().ljust(-(-len(why.encode()) // 8) * 8, b"\0"), np.int64)
        for place in (*self._shape.children, self._shape.parent):
            if self._links is not None and place not in (apart_from, -1):
                self._links.send(place, Message(Kind.LEFT, 0, rank, 0, words))

    def _hear_of_leaver(self, place: int, message: Message) -> None:
        why = message.words.tobytes().rstrip(b"\0").decode("utf-8", "replace")
        self._tell_neighbours(message.number, why, apart_from=place)
        if why:
            self._part(f"rank {message.number}: {why}")
        else:
            self._suspect(message.number, "")

    def _lose(self, place: int, why: str) -> None:
        self._tell_neighbours(self.ranks[place], "", apart_from=place)
        self._suspect(self.ranks[place], why)

    def _suspect(self, rank: int, why: str) -> None:
        """A rank cannot be reached; has it left?"""
        if self._phase is Phase.CONNECTED or self._phase is Phase.MEETING:
            said = f"rank {rank}: {why}" if why else f"rank {rank}"
            self.trouble = f"one of the ranks {self.ranks} has ended or cannot be reached ({said})"
            self._phase, self._broken_at = Phase.BROKEN, time.monotonic()
            self._loop.call(self._do_pending_work)

    def _look_who_left(self) -> float | None:
        if self._members.state() & LEFT:
            who = self._members.others("gone")
            if who is None:
                return 0.05
            self._part(who or CLOSED)
            return None
        if time.monotonic() > self._broken_at + LOST:
            raise RuntimeError(self.trouble)
        return max(0.05, len(self.ranks) / _LOOKS_PER_SECOND)

    def _part(self, who: str) -> None:
        """A member has left: this rank meets the others again when all have come anew."""
        self._drop_links()
        self.trouble = ""
        self._phase = Phase.MEETING
        self._miss(who)
        self._members.end_generation()
        self._loop.call(self._do_pending_work)

    def _miss(self, why: str) -> None:
        with self._lock:
            self.missing = why
            items = list(self._queue)
            self._queue.clear()
            self._answering = len(items)  # until it is said what became of them
        self._begun.clear()
        self._miss_ranks(items, why)
        self._answering = 0

    def _drop_links(self) -> None:
        links, self._links = self._links, None
        if links is not None:
            links.close()

    def _end_exchange(self) -> None:
        self._phase = Phase.ENDED
        try:
            self._tell_neighbours(self.ranks[self._place], self._why or self.failed)
            self._drop_links()
            self._members.leave(self._why or self.failed)
        except Exception as error:
            _log.debug("leaving a group of ranks: %s: %s", type(error).__name__, error)
        running.discard(self)
        self._loop.users.discard(self)
        self._ended.set()

    @staticmethod
    def _first_words(error: Exception) -> str:
        """What the store or the system says, without the trace of its own code and what it advises."""
        text = str(error).strip().split("\n", 1)[0].split(". ", 1)[0] or type(error).__name__
        if type(error).__name__ in _STORE_ERRORS:
            return f"the job's store cannot be reached ({text}): the rank that holds it, usually rank 0, has ended"
        return text


def _check_files(ranks: int, connections: int) -> None:
    """A rank opens a file for each of its neighbours. What is left has to do for the training's own files.

    Raises:
        RuntimeError: it is too little.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        return
    if limit != resource.RLIM_INFINITY and used + connections + _FILES > limit:
        raise RuntimeError(
            f"an exchange of {ranks} ranks needs {connections} connections of this one, and of the {limit} files that this process may "
            f"open {used} are open: raise the limit (ulimit -n)"
        )


def _host_of(store: Any) -> str:
    """Of the process that holds the store, where it says so."""
    for _ in range(4):
        if isinstance(host := getattr(store, "host", None), str):
            return host
        store = getattr(store, "underlying_store", None)
    return os.environ.get("MASTER_ADDR", "")
