"""How far each record moves when nothing is wrong: measured between dumps of the golden training that differ by one rounding unit.

A fixed limit knows the dtype of a record and not what lies before it. A training whose weights were moved by one rounding unit
(``msprobe run --perturb ulp``), or that computes with fewer bits, shows how far round-off carries every single record; differences are then
counted in that unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import Matcher
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure import distances, roundoff, saved_tensors

Floats = npt.NDArray[np.float64]

NEIGHBOURS = 8
"""A record may hardly have moved by chance. It is held to move at least as far as half of so many records before and behind it do."""


def movements(golden: DumpTable, others: Sequence[DumpTable]) -> Floats:
    """float64 (rows of `golden`): the distance (`measure`) that is round-off in each row, at least half a unit of its dtype.

    Args:
        golden: the side that differences will be measured from.
        others: the same rank and step of further golden dumps, at least one.
    """
    moved = np.zeros(len(golden))
    for other in others:
        rows, _ = distances.paired_rows(other, golden, Matcher(Tree(other), Tree(golden)).run().pairs)
        measured = distances.distances(other, golden, rows)
        saved_tensors.refine(measured, other, golden, rows)
        distance = measured.distance
        places = np.fromiter((j for _, j in rows), np.int64, len(rows))
        np.maximum.at(moved, places, np.where(np.isfinite(distance), distance, 0.0))
    units = np.fromiter((roundoff.eps(dtype) for dtype in golden.dtype), np.float64, len(golden))
    floats = np.flatnonzero(units)
    moved[floats] = np.maximum(moved[floats], _around(moved[floats]))
    return np.maximum(np.maximum(moved, units / 2), 1e-15)


def _around(moved: Floats) -> Floats:
    """Median of each value's neighbours."""
    if not len(moved):
        return moved
    wide = np.pad(moved, NEIGHBOURS, mode="edge")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(wide, 2 * NEIGHBOURS + 1), axis=1))


def of_ranks(golden: Mapping[int, DumpTable], dumps: Sequence[Mapping[int, DumpTable]]) -> dict[int, Floats]:
    """`movements` of every rank that at least one of the dumps has."""
    moved_by_rank = {}
    for rank, side in golden.items():
        others = [sides[rank] for sides in dumps if rank in sides]
        if others:
            moved_by_rank[rank] = movements(side, others)
    return moved_by_rank
