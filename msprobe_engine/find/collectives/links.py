"""What orders the calls of different ranks: matched collectives and point-to-point messages.

The k-th call of an operation by every rank of a group is the same collective (all ranks of a group must issue the same calls in
the same order); the k-th send from a to b meets the k-th receive of b from a. A `Link` says from which calls data can flow to
which. `Links.reach` follows them forward in time: Lamport's happens-before, directed for broadcast, scatter, reduce and gather.

What follows from many beginnings is found for all of them at once, in time that is linear in the collectives and messages. A rank need not
know of all beginnings that reach it: two of different ranks, the earliest, are enough. Whatever rank is asked, one of them is another
one's, and what began elsewhere and came later goes no further than they do.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msprobe_engine.find.nonfinite.flags import Call, Trace
from msprobe_engine.formats.dump.collective_record import RECEIVES, SENDS, Groups, told_by

FROM_ROOT = ("broadcast", "scatter")
TO_ROOT = ("reduce", "gather")


@dataclass(frozen=True)
class Link:
    """One collective or message.

    Attributes:
        op: operation in normal spelling.
        sources, sinks: (rank, call index): data flows from every source to every sink.
        missing: ranks of the group whose call is not in the dumps.
        members: (rank, call index) of all participants.
    """

    op: str
    sources: tuple[tuple[int, int], ...]
    sinks: tuple[tuple[int, int], ...]
    missing: tuple[int, ...]
    members: tuple[tuple[int, int], ...]


@dataclass
class Links:
    """All links of one step. `at[(rank, index)]` are those a call takes part in; `overwritten` are calls whose
    buffers receive what a root gives."""

    links: list[Link] = field(default_factory=list)
    at: dict[tuple[int, int], list[Link]] = field(default_factory=dict)
    overwritten: set[tuple[int, int]] = field(default_factory=set)
    _out: dict[int, list[tuple[int, Link]]] = field(default_factory=dict)

    def add(self, link: Link) -> None:
        self.links.append(link)
        for member in link.members:
            self.at.setdefault(member, []).append(link)
        for rank, index in link.sources:
            self._out.setdefault(rank, []).append((index, link))

    def finish(self) -> Links:
        for events in self._out.values():
            events.sort(key=lambda item: item[0])
        return self

    def reach(self, rank: int, position: float) -> dict[int, float]:
        """For every rank that can know of (rank, position): the first call index there that comes after it."""
        reached: dict[int, float] = {rank: position}
        scanned: dict[int, int] = {}
        queue: list[tuple[float, int]] = [(position, rank)]
        while queue:
            index_here, rank_here = heapq.heappop(queue)
            if index_here > reached[rank_here]:
                continue
            events = self._out.get(rank_here, [])
            start = bisect.bisect_left(events, index_here, key=lambda item: item[0])
            end = scanned.get(rank_here, len(events))
            scanned[rank_here] = min(start, end)
            for index, link in events[start:end]:
                for other, place in link.sinks:
                    if (other != rank_here or place > index) and place < reached.get(other, math.inf):
                        reached[other] = place
                        heapq.heappush(queue, (place, other))
        return reached

    def find_possible_followers(self, starts: Mapping[int, float], places: Mapping[int, float]) -> set[int]:
        """Ranks whose place may follow from what began on another rank, without asking `reach` for each of them.

        Args:
            starts: rank -> from where on what began there goes out.
            places: rank -> the place that is asked for.
        """
        arrivals = Arrivals(starts)
        arrivals.spread_along(self.links)
        return {rank for rank, place in places.items() if arrivals.earliest_of_others(rank) <= place}


@dataclass(frozen=True)
class _Event:
    rank: int
    index: int
    op: str
    group: tuple[int, ...] | None
    root: int | None


Record = tuple[int, str, Mapping[str, Any]]
"""A communication call: its place in time, its name, and the record as the dump has it."""


def match_traces(traces: Mapping[int, Trace]) -> Links:
    """`match`, of traces. Buffers of a broadcast or scatter on ranks other than the root are taken out of the calls' inputs: they are
    overwritten."""
    links = match({rank: [(call.index, call.name, trace.raw(call)) for call in _collectives(trace)] for rank, trace in traces.items()})
    overwritten: dict[int, list[int]] = {}
    for rank, index in links.overwritten:
        overwritten.setdefault(rank, []).append(index)
    # Calls that several ranks share, by their id, and what is overwritten -> the calls, which keep the id, and those without these inputs.
    known: dict[tuple[int, ...], tuple[list[Call], list[Call]]] = {}
    for rank, places in overwritten.items():
        calls = traces[rank].calls
        key = (id(calls), *sorted(places))
        if key not in known:
            known[key] = calls, list(calls)
            for index in places:
                known[key][1][index] = replace(calls[index], ins=(), in_flags=0)
        traces[rank].calls = known[key][1]
    return links


def _collectives(trace: Trace) -> Iterator[Call]:
    return (call for call in trace.calls if call.kind == "collective")


def match(ranks: Mapping[int, Iterable[Record]]) -> Links:
    """Match the communication calls of all ranks of one step, in order of execution each."""
    known: Groups = {}
    everyone, overwritten = tuple(sorted(ranks)), set[tuple[int, int]]()
    groups: dict[tuple[str, tuple[int, ...] | None], dict[int, list[_Event]]] = {}
    sends: dict[tuple[int, int], list[_Event]] = {}
    receives: dict[tuple[int, int], list[_Event]] = {}
    for rank, calls in ranks.items():
        for call in calls:
            for call_of_group in told_by(known, *call[1:]):
                event = _Event(rank, call[0], *call_of_group)
                if event.op in FROM_ROOT and event.root not in (None, rank):
                    overwritten.add((rank, event.index))
                if event.op in SENDS:
                    if event.root is not None:
                        sends.setdefault((rank, event.root), []).append(event)
                elif event.op in RECEIVES:
                    if event.root is not None:
                        receives.setdefault((event.root, rank), []).append(event)
                else:
                    groups.setdefault((event.op, event.group), {}).setdefault(rank, []).append(event)
    links = Links(overwritten=overwritten)
    for (op, group), by_rank in groups.items():
        for k in range(max(len(events) for events in by_rank.values())):
            links.add(_collective(op, group or everyone, [events[k] for events in by_rank.values() if k < len(events)]))
    for pair, sent in sends.items():
        got = receives.get(pair, [])
        for k, event in enumerate(sent):
            source = (event.rank, event.index)
            sink = ((got[k].rank, got[k].index),) if k < len(got) else ()
            links.add(Link("send", (source,), sink, () if sink else (pair[1],), (source, *sink)))
    for pair, got in receives.items():
        for event in got[len(sends.get(pair, [])) :]:
            member = (event.rank, event.index)
            links.add(Link("send", (), (member,), (pair[0],), (member,)))
    return links.finish()


def _collective(op: str, group: Sequence[int], events: Sequence[_Event]) -> Link:
    members = tuple((event.rank, event.index) for event in events)
    present = {rank for rank, _ in members}
    missing = tuple(rank for rank in group if rank not in present)
    roots = {event.root for event in events if event.root is not None}
    root = roots.pop() if len(roots) == 1 else None
    at_root = tuple(member for member in members if member[0] == root)
    if root is not None and op in FROM_ROOT:
        return Link(op, at_root, members, missing if root in missing else (), members)
    if root is not None and op in TO_ROOT:
        return Link(op, members, at_root, missing, members)
    return Link(op, members, members, missing, members)


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

    def spread_along(self, links: Sequence[Link]) -> None:
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
        place = come.get(rank, 0)
        while place < len(events) and done[events[place][1]]:
            place += 1
        come[rank] = place
        open_until, place = events[place][0] if place < len(events) else math.inf, gone.get(rank, 0)
        while place < len(going) and going[place][0] <= open_until:
            waiting[going[place][1]] -= 1
            if not waiting[going[place][1]] and not done[going[place][1]]:
                ready.append(going[place][1])
            place += 1
        gone[rank] = place

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
