"""The updates of several ranks as that of one: what one process does for all parameters before it goes on to something else is done for the
parameters of one rank after the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from msprobe_engine.align.calls.longest_common import align

_LONGEST = 32
"""Calls that an update makes for one parameter."""


@dataclass(frozen=True)
class Loop:
    """Calls that come again and again.

    Attributes:
        body: what is repeated.
        start, stop: from the first repetition to the end of the last.
    """

    body: tuple[int, ...]
    start: int
    stop: int


def in_turns(lists: Sequence[Sequence[Hashable]]) -> Iterator[tuple[int, range]]:
    """Lists of calls in turns: up to the first loop that all of them have, that loop, up to the next.

    Yields:
        (number of the list, places in it).
    """
    numbers: dict[Hashable, int] = {}
    coded = [[numbers.setdefault(kind, len(numbers)) for kind in some] for some in lists]
    found = [loops(some) for some in coded]
    bodies: dict[tuple[int, ...], int] = {}
    keys = [[bodies.setdefault(loop.body, len(bodies)) for loop in some] for some in found]
    common = keys[0] if keys else []
    for some in keys[1:]:
        common = [common[i] for i, _ in align(common, some)]
    cuts = [_cuts(some, key, common, len(whole)) for some, key, whole in zip(found, keys, coded)]
    for turn in range(2 * len(common) + 1):
        for at, places in enumerate(cuts):
            if places[turn] < places[turn + 1]:
                yield at, range(places[turn], places[turn + 1])


def _cuts(found: Sequence[Loop], keys: Sequence[int], common: Sequence[int], length: int) -> list[int]:
    """Where the loops that all have begin and end, with the ends of the list."""
    cuts, at = [0], 0
    for key in common:
        at = keys.index(key, at)
        cuts += [found[at].start, found[at].stop]
        at += 1
    return [*cuts, length]


def loops(calls: Sequence[int]) -> list[Loop]:
    """The loops in a list of calls, from its start; of several at one place the one that covers most.

    >>> [(loop.body, loop.start, loop.stop) for loop in loops([9, 1, 2, 1, 2, 1, 2, 3, 3, 3])]
    [((1, 2), 1, 7), ((3,), 7, 10)]
    """
    found: list[Loop] = []
    at = 0
    while at < len(calls):
        best, covered = 0, 0
        for size in range(1, min(_LONGEST, (len(calls) - at) // 2) + 1):
            stop = at + size
            while calls[stop : stop + 1] == calls[stop - size : stop - size + 1] and stop < len(calls):
                stop += 1
            times = (stop - at) // size
            if times > 1 and times * size > max(covered, 2):
                best, covered = size, times * size
        if best:
            found.append(Loop(tuple(calls[at : at + best]), at, at + covered))
        at += covered or 1
    return found
