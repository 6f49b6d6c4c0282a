"""Which ranks take part in a group of the probe's own. They say so through the job's store: nothing is built, and nobody is waited for,
before all of them have come.

A rank may have no probe, may attach later, or may close its probe while the others go on. Each member therefore says that it has come and
that it leaves, by counters in the store that every rank reads alike; two ranks cannot come to different conclusions. Keys, below one
prefix per purpose, list of ranks and place (`_claim_place`)::

    generation       goes up when a member leaves: who comes after that meets the others in the next one
    {g}/count        + 1 for each member that has come, + `_LEAVER` for each that leaves
    {g}/state        `COMPLETE`: all have come before any has left, so all of them connect. Otherwise `VOID`: nobody does.
                     `LEFT` is added when a member of a complete group leaves
    {g}/rank{R}      what this rank says of itself: where it can be reached, or why it has left
    {g}/absent       which ranks have not come, and why: the first that misses them asks, the others read its answer
    {g}/gone         the same of those that have come and left

Every operation is one round trip that never waits for another rank; a healthy start takes about six, and none follows. The lock of a
client of a TCPStore is held during a `wait` or `get` of a key that is missing, which would keep the training from its own use of the store;
so nothing is asked for before `check` has said that it is there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

from msprobe_engine.probe.incident.notify import Store
from msprobe_integrations.common.ranks.replica_channel import SILENT

COMPLETE, VOID, LEFT = 1, 2, 4
"""Bits of the state of a generation."""
HERE = "takes part"
_LEAVER = 1 << 32
_DECIDED = 2.0
"""Seconds that a rank waits for one of the same process, which had its place before, to leave."""
_LONGEST_ANSWER = 5.0
"""Seconds that ranks wait for what another one says of those that have not come."""


class _Place:
    """One group of this process among those of the same purpose and ranks."""

    def __init__(self, before: _Place | None) -> None:
        self.before = before
        self.given_up = False
        self.left = False


_places: dict[tuple[Any, ...], list[_Place]] = {}


def _claim_place(key: tuple[Any, ...]) -> tuple[int, _Place]:
    """The lowest place that is free in this process. Two probes at a time are kept apart by it; one after the other they have the same."""
    places = _places.setdefault(key, [])
    number = next((i for i, place in enumerate(places) if place.given_up), len(places))
    own_place = _Place(places[number] if number < len(places) else None)
    places[number : number + 1] = [own_place]
    return number, own_place


class Members:
    """The members of one group as this rank sees them. Made on the training's thread, used by one other thread.

    Args:
        purpose: what the group is for; ranks that want different things do not meet.
        ranks: global ranks, the same list on all of them.
    """

    def __init__(self, store: Store, purpose: str, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self._store, self._rank = store, rank
        place, self._place = _claim_place((store, purpose, self.ranks))
        name = hashlib.sha1(" ".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
        self._prefix = f"msprobe/group/{purpose}/{name}/{place}"
        self._generation = -1
        self._left = self._ended = False
        self._until = time.monotonic() + _DECIDED
        self._asked: dict[str, tuple[bool, float]] = {}

    def give_up_place(self) -> None:
        """Who comes next in this process has the same place, and comes after this one has left."""
        self._place.given_up = True

    def arrive(self, address: str) -> bool:
        """Say that this rank takes part, and where it can be reached; False while one of this process that was here before has not left."""
        before = self._place.before
        if before is not None and not before.left and time.monotonic() < self._until:
            return False
        self._place.before = None
        generation = self._add("generation", 0)
        if generation != self._generation:
            self._generation, self._ended, self._asked = generation, False, {}
            self._store.set(self._key(f"rank{self._rank}"), f"{HERE} {address}")
            if self._add(f"{generation}/count", 1) == len(self.ranks):
                self._add(f"{generation}/state", COMPLETE)
        return True

    def state(self) -> int:
        """Of this generation, as bits; 0: members are missing. When it is void, `arrive` goes to the next one as soon as there is one."""
        return VOID if self._ended else self._add(f"{self._generation}/state", 0)

    def end_generation(self) -> None:
        """A member has left: this generation is over for this rank too."""
        self._ended = True

    def leave(self, why: str) -> None:
        """Say that this rank takes part no longer."""
        try:
            if not self._left and self._generation >= 0:
                self._left = True
                self._store.set(self._key(f"rank{self._rank}"), why)
                leavers, arrived = divmod(self._add(f"{self._generation}/count", _LEAVER), _LEAVER)
                if leavers == 1:
                    self._add(f"{self._generation}/state", LEFT if arrived == len(self.ranks) else VOID)
                    self._add("generation", 1)
        finally:
            self._place.left = True

    def key(self) -> bytes:
        """Of this generation, 20 bytes, the same on all members."""
        return hashlib.sha1(self._key("tree").encode(), usedforsecurity=False).digest()

    def address(self, rank: int) -> str:
        """Where a member of a complete group can be reached; empty when it has left."""
        text = self._read_reason(rank)
        return text[len(HERE) + 1 :] if text.startswith(HERE) else ""

    def others(self, what: str) -> str | None:
        """What the ranks that take no part say of themselves, in words; None: another rank asks them and has not answered yet.

        Args:
            what: ``absent``: they have not come; ``gone``: they have, and have left.
        """
        key = self._key(what)
        if what not in self._asked:
            self._asked[what] = self._add(f"{self._generation}/{what}/asked", 1) == 1, time.monotonic()
        asks, since = self._asked[what]
        said: dict[str, list[int]] = {}
        if not asks and self._store.check([key]):
            said = json.loads(bytes(self._store.get(key)))
        elif asks or time.monotonic() > since + _LONGEST_ANSWER:
            for rank in self.ranks:
                if not (text := self._read_reason(rank)).startswith(HERE):
                    said.setdefault(text, []).append(rank)
            self._store.set(key, json.dumps(said))
        else:
            return None
        return describe_others({text: [rank for rank in ranks if rank != self._rank] for text, ranks in said.items()})

    def _read_reason(self, rank: int) -> str:
        key = self._key(f"rank{rank}")
        return bytes(self._store.get(key)).decode("utf-8", "replace") if self._store.check([key]) else SILENT

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._generation}/{name}"

    def _add(self, name: str, amount: int) -> int:
        return int(self._store.add(f"{self._prefix}/{name}", amount))


def describe_others(said: dict[str, list[int]]) -> str:
    """``rank 1: it has no probe, or one whose settings leave this out; ranks 3, 7: its probe was closed``."""
    parts = []
    for text, ranks in said.items():
        if ranks:
            names = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
            parts.append(f"rank{'s' if len(ranks) > 1 else ''} {names}: {text}")
    return "; ".join(parts)
