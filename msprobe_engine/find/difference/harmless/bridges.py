"""Calls that one side alone makes between two records that both have: what they tell of the numbers that came through them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.core.operator_traits import MOVES, SCALINGS
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS
from msprobe_engine.measure import distances, roundoff
from msprobe_engine.measure.distances import Floats

MOST = 6
"""Calls of one side only that are looked through for what went into them."""

_ROUNDINGS = 8.0
"""Units by which two ways to one number may differ."""


def coarsest(tree: Tree, row: int, alone: Collection[int], depth: int = 0) -> float:
    """Unit of the coarsest dtype that the elements of a row came through: its own, that of what gave it out, and where this side alone
    makes that call, those of what went into it: a sum of many elements moves by less than the unit of one, as their number has a root.

    Args:
        tree, row: the side and the row.
        alone: its records without a partner.
    """
    side = tree.side
    largest: float = roundoff.eps(side.dtype[row])
    op = tree.producers.get(row)
    if op is None:
        return largest
    numbers, size = side.stats[row].tobytes(), distances.elements(side.shape[row])
    for other in side.rows(op):
        unit = roundoff.eps(side.dtype[other])
        if side.role[other] == OUTPUT and side.stats[other].tobytes() == numbers:
            largest = max(largest, unit)
        elif side.role[other] in (INPUT, PARAMETERS) and unit > 0 and op in alone and depth < MOST:
            share = math.sqrt(size / max(size, distances.elements(side.shape[other])))
            largest = max(largest, coarsest(tree, other, alone, depth + 1) * share)
    return largest


def rounds(tree: Tree, row: int, alone: Collection[int], depth: int = 0) -> bool:
    """May what this side alone does to the elements of a row have rounded them? Calls that move elements, from a type to the same one, do
    not; of what no record gave out, nothing is known of its way."""
    side, op = tree.side, tree.producers.get(row)
    if op is None or op not in alone:
        return False
    if depth >= MOST or len(tree.kinds[op]) != 3 or tree.kinds[op][-1] not in MOVES:
        return True
    taken = [other for other in side.rows(op) if side.role[other] in (INPUT, PARAMETERS) and roundoff.eps(side.dtype[other]) > 0]
    unit = roundoff.eps(side.dtype[row])
    return any(roundoff.eps(side.dtype[other]) != unit or rounds(tree, other, alone, depth + 1) for other in taken)


def leads_to(tree: Tree, users: Mapping[int, Sequence[int]], op: int, alone: Collection[int], numbers: Floats) -> set[int]:
    """The calls that make these numbers of what a record gives, where this side alone makes all that take it in; else none. In the backward
    pass calls of both sides that only move elements are passed through.

    Args:
        tree, users: the side, and record -> records that take in what it gave out.
        op: the record.
        alone: records of this side without a partner.
        numbers: float64 (4,), Max, Min, Mean, Norm of a tensor.
    """
    side, wave, seen = tree.side, [op], {op}
    backward = tree.kinds[op][0] == "backward"
    for depth in range(MOST):
        wave = [user for call in wave for user in users.get(call, ()) if user not in seen and len(tree.kinds[user]) == 3]
        known = [
            user for user in wave if user in alone or (backward and tree.kinds[user][0] == "backward" and tree.kinds[user][-1] in MOVES)
        ]
        if not wave or (not depth and len(known) < len(wave)):
            return set()
        wave = known
        seen.update(wave)
        for user in wave:
            for row in side.rows(user):
                if side.role[row] == OUTPUT and near(side.stats[row], numbers, roundoff.eps(side.dtype[row])):
                    return seen
    return set()


def near(target: Floats, golden: Floats, unit: float) -> bool:
    """Two rows of statistics are those of one tensor, computed in two ways with this unit."""
    with np.errstate(invalid="ignore"):
        scale = np.maximum(np.abs(target), np.abs(golden)).max()
        return bool(scale > 0 and (np.abs(target - golden) <= _ROUNDINGS * unit * scale).all())


def scaled_by(tree: Tree, row: int, alone: Collection[int]) -> float:
    """The whole number, or one over it, that a call of this side alone has multiplied a tensor by before a record takes it in: what ranks
    and micro batches are counted by. 1: no such call gave it out."""
    side, op = tree.side, tree.producers.get(row)
    if op not in alone or op is None or len(tree.kinds[op]) != 3 or tree.kinds[op][0] != "forward" or tree.kinds[op][-1] not in SCALINGS:
        return 1.0
    numbers = [side.values[other] for other in side.rows(op) if side.role[other] == INPUT and other in side.values]
    values = [float(number) for number in numbers if isinstance(number, int | float) and not isinstance(number, bool)]
    if len(values) != 1 or len(tree.tensors_in(op)) - len(values) > 1 or not values[0] > 0 or math.isinf(values[0]):
        return 1.0
    whole = max(values[0], 1.0 / values[0])
    if abs(whole - round(whole)) > 1e-6 * whole:
        return 1.0
    return 1.0 / values[0] if "div" in tree.kinds[op][-1] else values[0]
