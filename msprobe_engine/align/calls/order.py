"""What two sides say of the order of their records."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def out_of_order(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of matched records as few as possible without which the others stand in one order on both sides.

    >>> out_of_order([(0, 0), (1, 2), (2, 1), (3, 3)])
    [(1, 2)]

    Args:
        pairs: records of the target and of the golden side, by their places in the files.
    """
    ordered = sorted(pairs)
    ends: list[int] = []
    """Of each length: the place in `ordered` where an ascending row of so many ends earliest on the golden side, and there `lasts`."""
    lasts: list[int] = []
    before = [-1] * len(ordered)
    for at, (_, other) in enumerate(ordered):
        length = bisect_left(lasts, other)
        if length == len(lasts):
            lasts.append(other)
            ends.append(at)
        else:
            lasts[length], ends[length] = other, at
        before[at] = ends[length - 1] if length else -1
    kept = set()
    at = ends[-1] if ends else -1
    while at >= 0:
        kept.add(at)
        at = before[at]
    return [pair for at, pair in enumerate(ordered) if at not in kept]
