"""Calls that one side alone makes between two records that both have: what they tell of the numbers that came through them."""

from __future__ import annotations

from collections.abc import Collection

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS
from msprobe_engine.measure import distances, roundoff

MOST = 6
"""Calls of one side only that are looked through for what went into them."""


def coarsest(tree: Tree, row: int, alone: Collection[int], depth: int = 0) -> float:
    """Unit of the coarsest dtype that the elements of a row came through: its own, that of what gave it out, and where this side alone
    makes that call, those of what went into it, but for what it sums over: a sum of many elements does not move by the unit of one.

    Args:
        tree, row: the side and the row.
        alone: its records without a partner.
    """
    side = tree.side
    found: float = roundoff.eps(side.dtype[row])
    op = tree.producers.get(row)
    if op is None:
        return found
    numbers, size = side.stats[row].tobytes(), distances.elements(side.shape[row])
    for other in side.rows(op):
        unit = roundoff.eps(side.dtype[other])
        if side.role[other] == OUTPUT and side.stats[other].tobytes() == numbers:
            found = max(found, unit)
        elif side.role[other] in (INPUT, PARAMETERS) and unit > 0 and distances.elements(side.shape[other]) <= size:
            found = max(found, coarsest(tree, other, alone, depth + 1) if op in alone and depth < MOST else 0.0)
    return found
