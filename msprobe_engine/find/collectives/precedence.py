"""Which of many beginnings come after another one: all of them at once, in time that is linear in the collectives and messages.

A rank need not know of all beginnings that reach it. Two of different ranks, the earliest, are enough: whatever rank is asked, one of
them is another one's, and what began elsewhere and came later goes no further than they do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msprobe_engine.find.collectives.links import Link

_KEPT = 2
"""Beginnings that a rank remembers."""


class Arrivals:
    """What has come to each rank.

    Args:
        starts: rank -> the call index from which on what began there goes out.
    """

    def __init__(self, starts: Mapping[int, float]) -> None:
        self._of_rank: dict[int, dict[int, float]] = {rank: {rank: place} for rank, place in starts.items()}

    def earliest_of_others(self, rank: int) -> float:
        """The first call index of a rank that comes after what began on another one; infinite where there is none."""
        return min((place for source, place in self._of_rank.get(rank, {}).items() if source != rank), default=math.inf)

    def follow(self, links: Sequence[Link]) -> None:
        """Let all that has begun go along the links, forward in time. Links are taken in an order in which what comes to a source is known
        before; where calls of several ranks wait for each other there is no such order, and a further round is made."""
        ordered = list(in_time(links))
        while sum(map(self._go_along, ordered)):
            pass

    def _go_along(self, link: Link) -> bool:
        through: dict[int, None] = {}
        for rank, index in link.sources:
            for source, place in self._of_rank.get(rank, {}).items():
                if place <= index:
                    through[source] = None
            if len(through) >= _KEPT:
                break
        changed = False
        for source in list(through)[:_KEPT]:
            for rank, index in link.sinks:
                changed = self._arrive(rank, source, index) or changed
        return changed

    def _arrive(self, rank: int, source: int, place: float) -> bool:
        known = self._of_rank.setdefault(rank, {})
        if place >= known.get(source, math.inf):
            return False
        if source not in known and len(known) == _KEPT:
            last = max(known, key=known.__getitem__)
            if place >= known[last]:
                return False
            del known[last]
        known[source] = place
        return True


def in_time(links: Sequence[Link]) -> Iterator[Link]:
    """The links, each behind those that bring something to one of its sources; of those that wait for each other the first ones first."""
    incoming: dict[int, list[tuple[int, int]]] = {}
    outgoing: dict[int, list[tuple[int, int]]] = {}
    for number, link in enumerate(links):
        for members, of_rank in ((link.sinks, incoming), (link.sources, outgoing)):
            for rank, index in members:
                of_rank.setdefault(rank, []).append((index, number))
    for events in (*incoming.values(), *outgoing.values()):
        events.sort()
    waiting = [len(link.sources) for link in links]
    done = [False] * len(links)
    come, gone = dict.fromkeys(outgoing, 0), dict.fromkeys(outgoing, 0)
    ready = [number for number, sources in enumerate(waiting) if not sources]

    def let_go(rank: int) -> None:
        """Sources of a rank before which nothing comes in any more wait no longer."""
        events, going = incoming.get(rank, []), outgoing.get(rank, [])
        at = come.get(rank, 0)
        while at < len(events) and done[events[at][1]]:
            at += 1
        come[rank] = at
        open_until, at = events[at][0] if at < len(events) else math.inf, gone.get(rank, 0)
        while at < len(going) and going[at][0] <= open_until:
            waiting[going[at][1]] -= 1
            if not waiting[going[at][1]] and not done[going[at][1]]:
                ready.append(going[at][1])
            at += 1
        gone[rank] = at

    for rank in outgoing:
        let_go(rank)
    for forced in range(len(links) + 1):
        while ready:
            number = ready.pop()
            if not done[number]:
                done[number] = True
                yield links[number]
                for rank, _ in links[number].sinks:
                    let_go(rank)
        if forced < len(links) and not done[forced]:
            ready.append(forced)
