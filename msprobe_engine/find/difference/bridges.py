"""Calls that one side alone makes between two records that both have: what they tell of the numbers that came through them."""

from __future__ import annotations

from collections.abc import Collection

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.formats.dump.dump_table import INPUT, PARAMETERS
from msprobe_engine.measure import roundoff

MOST = 6
"""Calls of one side only that are looked through for what went into them."""


def coarsest(tree: Tree, row: int, alone: Collection[int], depth: int = 0) -> float:
    """Unit of the coarsest dtype that the numbers of a row came through: its own, those of what went into the call that made it, and where
    this side alone makes that call, those of what went into the calls before it.

    Args:
        tree, row: the side and the row.
        alone: its records without a partner.
    """
    side = tree.side
    found: float = roundoff.eps(side.dtype[row])
    op = tree.producers.get(row)
    if op is None:
        return found
    went_in = [other for other in side.rows(op) if side.role[other] in (INPUT, PARAMETERS) and roundoff.eps(side.dtype[other]) > 0]
    if op not in alone or depth >= MOST:
        return max((found, *(roundoff.eps(side.dtype[other]) for other in went_in)))
    return max((found, *(coarsest(tree, other, alone, depth + 1) for other in went_in)))
