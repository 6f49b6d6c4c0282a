"""Gradients that are added up over micro batches, and summed over the ranks once or after each of them.

A rank that has its sum with the others early holds another part of the same whole from the second micro batch on. The sum over all ranks is
the same; of the statistics the mean adds up, and what the last sum over ranks gives out tells, where it was recorded. A run that shows the
gradient of each micro batch by itself has the sum of another one in all of them up to there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from msprobe_engine.core.operator_traits import of_reducer
from msprobe_engine.find.difference.harmless import bookkeeping
from msprobe_engine.find.difference.walk import DifferenceWalk, Walk
from msprobe_engine.find.origin import GRADIENT, DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import PARAMETERS_GRAD
from msprobe_engine.measure import distances
from msprobe_engine.measure.distances import Floats

_FEWEST = 6
"""Parameters whose means tell."""

_NEAR = 0.1
"""Part of the means by which their sums over ranks may differ; a micro batch that is lost, or counted twice, changes them by half."""


def leave_out_early_sums(walkers: Mapping[int, DifferenceWalk], walks: Mapping[int, Walk]) -> None:
    """Take from the origins of all ranks those that are shares of gradients whose sum over ranks is the same."""
    if len(walkers) < 2 or not all(walk.origins for walk in walks.values()):
        return
    shares = {rank: [origin for origin in walk.origins if _is_of_later_micro_batch(walkers[rank], origin)] for rank, walk in walks.items()}
    if any(not some or len(some) < len(walks[rank].origins) for rank, some in shares.items()):
        return
    if all(map(_sums_agree, walkers.values())) or _means_agree(walkers, shares):
        for walk in walks.values():
            walk.origins = []


def _is_of_later_micro_batch(walker: DifferenceWalk, origin: DifferenceOrigin) -> bool:
    """A gradient of a parameter that had one before, of an earlier micro batch, which was the same."""
    if origin.kind != GRADIENT or not walker.target.is_gradients(origin.op):
        return False
    kind = walker.target.kinds[origin.op]
    before = [op for op in walker.gradients.get(kind[2], []) if op < origin.op]
    return bool(before) and not walker.is_off(before[0])


def _sums_agree(walker: DifferenceWalk) -> bool:
    """The last sums over ranks were recorded, and give the same."""
    calls = [op for op, _ in walker.structure.pairs if of_reducer(walker.side.ops[op])]
    return bool(calls) and bookkeeping.gives_the_same(walker, calls[-1])


def _means_agree(walkers: Mapping[int, DifferenceWalk], shares: Mapping[int, list[DifferenceOrigin]]) -> bool:
    """The means, over all ranks, of the gradients that differ are the same on both sides."""
    off = {walkers[rank].side.ops[origin.op] for rank, some in shares.items() for origin in some}
    return any(_sums_of_means_agree(walkers, off, added_up) for added_up in (None, 0, 1))


def _sums_of_means_agree(walkers: Mapping[int, DifferenceWalk], off: set[str], added_up: int | None) -> bool:
    """`added_up`: the side, 0 the target, whose gradients are those of each micro batch; None: neither."""
    sums: dict[str, list[Floats]] = {}
    for walker in walkers.values():
        for name, means in _means(walker, off, added_up):
            sums.setdefault(name, []).append(means)
    whole = [np.sum(means, axis=0) for means in sums.values() if len(means) == len(walkers)]
    if len(whole) < _FEWEST:
        return False
    target_means, golden_means, sizes = np.array(whole).T
    return bool(np.linalg.norm((target_means - golden_means) / sizes) <= _NEAR * np.linalg.norm(golden_means / sizes))


def _means(walker: DifferenceWalk, off: set[str], added_up: int | None) -> Iterator[tuple[str, Floats]]:
    """Name of a gradient, and float64 (3,): its mean on both sides, and what the mean of so many elements of its size may be."""
    side, golden = walker.side, walker.golden.side
    before: dict[tuple[str, str], Floats] = {}
    for op, _ in walker.structure.pairs:
        for pair in walker.span_of(op) if walker.target.is_gradients(op) else ():
            row, golden_row = walker.rows[pair]
            norm, count = float(golden.stats[golden_row][3]), distances.elements(side.shape[row])
            parameter = walker.target.kinds[op][2], side.name[row].rpartition(".")[2]
            means = np.array((side.stats[row][2], golden.stats[golden_row][2]))
            earlier = before.get(parameter, np.zeros(2))
            before[parameter] = earlier + means
            if side.ops[op] in off and side.role[row] == PARAMETERS_GRAD and norm > 0:
                if added_up is not None:
                    means[added_up] += earlier[added_up]
                yield side.name[row], np.array((*means, norm / np.sqrt(count)))
