"""Ranks beside each other: which collective calls belong together, what the other ranks put into them, and who was first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from msprobe_engine.find.collectives import links
from msprobe_engine.find.collectives.links import Links
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.origin import DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import INPUT, DumpTable


def match_links(sides: Mapping[int, DumpTable]) -> Links:
    """The collectives and messages of all ranks of one step; call indices are record indices."""
    return links.match({rank: [(op, side.ops[op], raw) for op, raw in side.collectives.items()] for rank, side in sides.items()})


def peer_distance(walkers: Mapping[int, DifferenceWalk], links: Links) -> dict[int, dict[int, float]]:
    """Rank -> record of a collective -> largest distance of what other ranks put into it."""
    out: dict[int, dict[int, float]] = {rank: {} for rank in walkers}
    for link in links.links:
        put_in: dict[int, float] = {}  # by rank; looked up once, however many ranks take it out again
        for rank, op in link.sources:
            if rank in walkers:
                put_in[rank] = max(put_in.get(rank, 0.0), taken_in(walkers[rank], op))
        largest, next_largest = (*heapq.nlargest(2, put_in, key=put_in.__getitem__), -1, -1)[:2]
        for rank, op in link.sinks:
            other_rank = next_largest if rank == largest else largest
            if rank in walkers and other_rank >= 0:
                out[rank][op] = max(out[rank].get(op, 0.0), put_in[other_rank])
    return out


def taken_in(walker: DifferenceWalk, op: int) -> float:
    """Largest distance of the tensors that a record takes in; 0 when nothing of them was measured."""
    m, role = walker.measured, walker.side.role
    tensors = (pair for pair in walker.span_of(op) if role[walker.rows[pair][0]] == INPUT and not m.argument[pair])
    return max((float(m.distance[pair]) for pair in tensors), default=0.0)


def first_in_time(origins: Mapping[int, Sequence[DifferenceOrigin]], links: Links) -> list[tuple[int, DifferenceOrigin]]:
    """(rank, origin), first the one that no other rank's first origin comes before; among equals the earlier call, then the larger."""
    firsts = {rank: some[0] for rank, some in origins.items() if some}
    places = {rank: origin.op for rank, origin in firsts.items()}
    preceded = links.find_possible_followers(places, places)
    order = sorted(firsts, key=lambda rank: (rank in preceded, firsts[rank].op, -firsts[rank].weight, rank))
    head = [(rank, firsts[rank]) for rank in order]
    rest = sorted(((rank, o) for rank, some in origins.items() for o in some[1:]), key=lambda item: (item[1].op, item[0]))
    return head + rest
