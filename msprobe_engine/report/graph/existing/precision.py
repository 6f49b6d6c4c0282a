"""How far a node is from its partner, in the numbers of both versions of the existing tool (``precision_index``).

8.1.1 gives a number in [0, 1]:

* statistics: the largest relative error of Max, Min, Mean and Norm of the results, at most 1; 1 when Max or Min of a result is NaN or
  infinite; what cannot be divided counts 0;
* saved tensors: the smallest share of elements within one thousandth among the inputs, minus that among the results; 1 when a result has
  NaN or Inf, 0 when only inputs have;
* checksums, the other way round: 1 when all are equal, else 0.

26.2.0 gives 0 (pass), 0.5 (warning) or 1 (error), the worst verdict of the node's rows (`Verdicts`). In both a collection has the number of
its worst member, and calls that give uninitialised memory have what stands for no difference, but in 26.2.0 with checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from msprobe_engine.find.verdicts.version_262 import PASS, UNINITIALISED
from msprobe_engine.measure.factorize import Bools
from msprobe_engine.report.graph.nodes.model import API_COLLECTION, ROOT, Graph, TaskOfGraph
from msprobe_engine.report.graph.nodes.rows import Floats, Numbers, PairedRows

Index = list[float | None]


def relative_errors(rows: PairedRows, target_numbers: Numbers, golden_numbers: Numbers) -> tuple[Floats, Floats]:
    """float64 (n, 4) each: difference, target minus golden, and relative error as a fraction. A difference is NaN where one side has no
    number; a relative error also where the golden number is 0."""
    golden_rows = np.where(rows.matched, rows.golden_rows, 0)
    known = target_numbers.known[rows.target_rows] & rows.matched[:, None]
    if len(golden_numbers.values):
        golden_values = golden_numbers.values[golden_rows]
        known &= golden_numbers.known[golden_rows]
    else:
        golden_values = np.full(known.shape, np.nan)
    with np.errstate(all="ignore"):
        difference = np.where(known, target_numbers.values[rows.target_rows] - golden_values, np.nan)
        relative = np.where(golden_values != 0, np.abs(difference / golden_values * 100) / 100, np.nan)
    return difference, relative


def statistics_811(rows: PairedRows, target_numbers: Numbers, relative: Floats) -> Floats:
    """float64 (m,): the number of 8.1.1 per node, from statistics."""
    largest = np.fmax.reduce(np.where(np.isnan(relative), 0.0, relative), axis=1) if len(relative) else np.zeros(0)
    largest[target_numbers.bad[rows.target_rows]] = 1.0
    counts = rows.results & target_numbers.some[rows.target_rows]
    return np.minimum(rows.largest(np.where(counts, largest, 0.0)), 1.0)


def checksums_811(rows: PairedRows, equal: Bools) -> Floats:
    """float64 (m,): 1 when all checksums of the node are equal, else 0."""
    return rows.smallest(equal.astype(np.float64))


def tensors_811(rows: PairedRows, target_numbers: Numbers, thousandth: Sequence[object]) -> Floats:
    """float64 (m,): the number of 8.1.1 per node, from saved tensors.

    Args:
        thousandth: (n,), the cells of ``One Thousandth Err Ratio`` in the words of that version; what is no number does not count.
    """
    shares = np.fromiter((_share(cell) for cell in thousandth), np.float64, len(rows))
    shape = rows.target.shape
    scalar = np.fromiter(
        (type(shape[row]) is list and not shape[row] and row not in rows.target.values for row in rows.target_rows.tolist()), bool
    )
    counts = target_numbers.some[rows.target_rows] & ~scalar
    bad = target_numbers.bad[rows.target_rows] & counts
    shares = np.where(counts & ~np.isnan(shares), shares, np.inf)
    inside, outside = (rows.smallest(np.where(part, shares, np.inf)) for part in (~rows.results, rows.results))
    bad_in, bad_out = (rows.largest((bad & part).astype(np.float64)) > 0 for part in (~rows.results, rows.results))
    with np.errstate(all="ignore"):
        lost = np.where(np.isfinite(inside) & np.isfinite(outside), np.minimum(inside, 1.0) - np.minimum(outside, 1.0), 0.0)
    return np.asarray(np.where(bad_out, 1.0, np.where(bad_in, 0.0, np.clip(lost, 0.0, 1.0))))


def _share(cell: object) -> float:
    try:
        return float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return float("nan")


def index_811(graph: Graph, rows: PairedRows, numbers: Floats, task: TaskOfGraph) -> Index:
    """Per node of the target the number of 8.1.1; None of nodes without a partner or rows."""
    best = 1.0 if task == "md5" else 0.0
    indexes = _spread(graph, rows, numbers, best)
    worst = min if task == "md5" else max
    _collections(graph, indexes, lambda members: worst([best, *(best if index is None else index for index in members)]))
    return indexes


def index_262(graph: Graph, rows: PairedRows, levels: Sequence[int], task: TaskOfGraph) -> Index:
    """Per node of the target 0, 0.5 or 1; None of nodes without a partner or rows.

    Args:
        levels: (m,), the worst verdict of each node, `verdicts.PASS` to `verdicts.ERROR`.
    """
    indexes = _spread(graph, rows, np.asarray(levels, np.float64) / 2, 1.0 if task == "md5" else float(PASS))
    _collections(graph, indexes, lambda members: max([0.0, *(index or 0.0 for index in members)]))
    return indexes


def _spread(graph: Graph, rows: PairedRows, numbers: Floats, best: float) -> Index:
    found: Index = [None] * len(graph)
    for node, value in zip(rows.nodes.tolist(), numbers.tolist()):
        parts = graph.names[node].split(".", 2)
        found[node] = best if len(parts) > 1 and parts[1] in UNINITIALISED else value
    return found


def _collections(graph: Graph, found: Index, worst: Callable[[list[float | None]], float]) -> None:
    """Collections below the root, and those within them first."""
    for node in graph.children[ROOT]:
        if graph.types[node] == API_COLLECTION:
            for inner in graph.children[node]:
                if graph.types[inner] == API_COLLECTION:
                    found[inner] = worst([found[child] for child in graph.children[inner]])
            found[node] = worst([found[child] for child in graph.children[node]])
