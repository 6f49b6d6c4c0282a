"""Which ranks take part in a group of the probe's own. They say so through the job's store: nothing is built, and nobody is waited for,
before all of them have come.

A rank may have no probe, may attach later, or may close its probe while the others go on. Each member therefore says that it has come and
that it leaves, by counters in the store that every rank reads alike; two ranks cannot come to different conclusions. Keys, below one
prefix per purpose, list of ranks and place (`_claim_place`)::

    generation       goes up when a member leaves: who comes after that meets the others in the next one
    {g}/count        + 1 for each member that has come, + `_LEAVER` for each that leaves
    {g}/state        `COMPLETE`: all have come before any has left, so all of them build the group. Otherwise `VOID`: nobody does.
                     `LEFT` is added when a member of a complete group leaves
    {g}/rank{R}      what this rank says of itself

Every operation is one round trip that never waits for another rank; a healthy start takes about six, and none follows while exchanges are
answered. The lock of a client of a TCPStore is held during a `wait` or `get` of a key that is missing, which would keep the training from
its own use of the store; so `Rendezvous`, which gloo is given, asks with `check`.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from msprobe_integrations.common.ranks.replica_channel import SILENT

COMPLETE, VOID, LEFT = 1, 2, 4
"""Bits of the state of a generation."""
HERE = "takes part"
_LEAVER = 1 << 32
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_DECIDED = 2.0
"""Seconds that a rank which leaves waits for what another one, which left a moment before, says of the group."""


_Store: Any = dist.Store  # type: ignore[attr-defined]


class _Place:
    """One group of this process among those of the same purpose and ranks."""

    def __init__(self, before: _Place | None) -> None:
        self.before = before
        self.given_up = False
        self.left = threading.Event()


_places: dict[tuple[Any, ...], list[_Place]] = {}


def _claim_place(key: tuple[Any, ...]) -> tuple[int, _Place]:
    """The lowest place that is free in this process. Two probes at a time are kept apart by it; one after the other they have the same."""
    places = _places.setdefault(key, [])
    number = next((i for i, place in enumerate(places) if place.given_up), len(places))
    mine = _Place(places[number] if number < len(places) else None)
    places[number : number + 1] = [mine]
    return number, mine


class Members:
    """The members of one group as this rank sees them. Made on the training's thread, used by one other thread.

    Args:
        store: of the job.
        purpose: what the group is for; ranks that want different things do not meet.
        ranks: global ranks, the same list on all of them.
        rank: this one.
    """

    def __init__(self, store: Any, purpose: str, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self._store, self._rank = store, rank
        place, self._place = _claim_place((store, purpose, self.ranks))
        name = hashlib.sha1(" ".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
        self._prefix = f"msprobe/group/{purpose}/{name}/{place}"
        self._generation = -1
        self._left = self._ended = False

    def give_up_place(self) -> None:
        """Who comes next in this process has the same place, and comes after this one has left."""
        self._place.given_up = True

    def arrive(self) -> None:
        """Say that this rank takes part."""
        if self._place.before is not None:
            self._place.before.left.wait(_DECIDED)
            self._place.before = None
        generation = self._add("generation", 0)
        if generation != self._generation:
            self._generation, self._ended = generation, False
            self._store.set(self._key(f"rank{self._rank}"), HERE)
            if self._add(f"{generation}/count", 1) == len(self.ranks):
                self._add(f"{generation}/state", COMPLETE)

    def state(self) -> int:
        """Of this generation, as bits; 0: members are missing. When it is void, `arrive` goes to the next one as soon as there is one."""
        return VOID if self._ended else self._add(f"{self._generation}/state", 0)

    def end_generation(self) -> None:
        """A member has left: this generation is over for this rank too."""
        self._ended = True

    def leave(self, why: str) -> bool:
        """Say that this rank takes part no longer; True when all had come before: then the others build the group, or have, and this rank
        has to build it too before it goes."""
        if self._left or self._generation < 0:
            self._place.left.set()
            return False
        self._left = True
        try:
            self._store.set(self._key(f"rank{self._rank}"), why)
            leavers, arrived = divmod(self._add(f"{self._generation}/count", _LEAVER), _LEAVER)
            if leavers == 1:
                complete = arrived == len(self.ranks)
                self._add(f"{self._generation}/state", LEFT if complete else VOID)
                self._add("generation", 1)
                return complete
            end = time.monotonic() + _DECIDED
            while not (state := self.state()) and time.monotonic() < end:
                time.sleep(_LONGEST_PAUSE)
            return bool(state & ~VOID)
        finally:
            self._place.left.set()

    def others(self) -> dict[str, list[int]]:
        """What the ranks that take no part say of themselves (`SILENT`: nothing), and which they are. One or two round trips for each of
        them."""
        said: dict[str, list[int]] = {}
        for rank in self.ranks:
            key = self._key(f"rank{rank}")
            text = bytes(self._store.get(key)).decode("utf-8", "replace") if self._store.check([key]) else SILENT
            if text != HERE and rank != self._rank:
                said.setdefault(text, []).append(rank)
        return said

    def rendezvous(self, cancelled: Callable[[], bool]) -> Rendezvous:
        """What connects the members of this generation."""
        return Rendezvous(self._store, self._key("gloo"), cancelled)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._generation}/{name}"

    def _add(self, name: str, amount: int) -> int:
        return int(self._store.add(f"{self._prefix}/{name}", amount))


class Rendezvous(_Store):  # type: ignore[misc]
    """The store that gloo's members find each other by. No operation holds the job's store while it waits, and `cancelled` ends a wait."""

    def __init__(self, store: Any, prefix: str, cancelled: Callable[[], bool]) -> None:
        super().__init__()
        self._store, self._prefix, self._cancelled = store, prefix, cancelled

    def set(self, key: str, value: Any) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._store.get(f"{self._prefix}/{key}"))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([f"{self._prefix}/{key}" for key in keys]))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(f"{self._prefix}/{key}", amount))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=15)) -> None:
        end, pause = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE
        while not self.check(keys):
            if self._cancelled():
                raise RuntimeError("the process ends")
            if time.monotonic() > end:
                raise RuntimeError(f"a rank of the group did not answer in {timeout.total_seconds():.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def has_extended_api(self) -> bool:
        return False


def describe_others(said: dict[str, list[int]]) -> str:
    """``rank 1: it has no probe, or one whose settings leave this out; ranks 3, 7: its probe was closed``."""
    parts = []
    for text, ranks in said.items():
        names = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {names}: {text}")
    return "; ".join(parts)
