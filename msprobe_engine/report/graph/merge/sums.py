"""Tensors that are one rank's term of something the ranks then reduce: a sum, mostly.

The product in a row-parallel layer, the gradient of the input of a column-parallel layer, the largest logit of a part of the vocabulary:
what one rank has of them says nothing about the whole, and no rule makes the whole's statistics of those of the terms. But the dump has
the whole: it is what the collective gave out. Which tensors are such terms follows from the numbers, as the same tensor goes from call
to call until the collective takes it in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from msprobe_engine.align.parallel import merge_statistics
from msprobe_engine.align.parallel.merge_statistics import Floats
from msprobe_engine.align.parallel.outcome import PASSING
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT
from msprobe_engine.measure import distances
from msprobe_engine.report.graph.merge.rank_stack import RankStack


class Sum(NamedTuple):
    """Attributes:
    record: the call that reduces.
    value: float64 (4,) of Max, Min, Mean, Norm of what comes out, on all ranks together.
    """

    record: int
    value: Floats


def terms(beside: RankStack) -> dict[int, Sum]:
    """Row -> what it is a term of."""
    first = beside.first
    by_key: dict[bytes, Sum] = {}
    for op in first.collectives:
        if "reduce" in first.ops[op]:
            for taken, given in _pairs(beside, op):
                value = _whole(beside, taken, given)
                if value is not None:
                    by_key.setdefault(beside.key(taken), Sum(op, value))
    found: dict[int, Sum] = {}
    differs = beside.tensor & ~beside.alike
    for op in reversed(range(len(first.ops)) if by_key else ()):
        rows = [row for row in first.rows(op) if differs[row]]
        sums = {row: by_key[key] for row in rows if (key := beside.key(row)) in by_key}
        found.update(sums)
        out = next((row for row in sums if first.role[row] == OUTPUT and op < sums[row].record), None)
        if out is not None and first.ops[op].split(".")[-3] in PASSING:
            size = distances.elements(first.shape[out])
            for row in rows:
                if first.role[row] == INPUT and distances.elements(first.shape[row]) == size and row not in sums:
                    by_key.setdefault(beside.key(row), sums[out])  # the same tensor in another dtype
                    found[row] = sums[out]
    return found


def _pairs(beside: RankStack, op: int) -> Iterator[tuple[int, int]]:
    """Tensors that a collective takes in, and what becomes of each."""
    taken, given = beside.tensors(op, (INPUT,)), beside.tensors(op, (OUTPUT,))
    if len(taken) == 2 * len(given):  # reduce_scatter is given the tensor it writes into first
        taken = taken[len(given) :]
    return zip(taken, given)


def _whole(beside: RankStack, taken: int, given: int) -> Floats | None:
    """Statistics of the result; None when these ranks did not reduce with each other, or had nothing to."""
    first = beside.first
    if beside.alike[taken] or not (beside.everywhere[taken] and beside.everywhere[given]):
        return None
    size, result = distances.elements(first.shape[taken]), distances.elements(first.shape[given])
    if size == result and beside.alike[given]:
        return np.array(beside.stats[0, given])
    if result * len(beside.ranks) == size:
        return merge_statistics.merged(beside.stats[:, given])
    return None
