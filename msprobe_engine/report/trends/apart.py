"""Where two runs go apart: every number that both have, by the rules of `msprobe_engine.find.monitor.number_pairs`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msprobe_engine.find.monitor.number_pairs import COMPARED, OF_THE_MACHINE
from msprobe_engine.report.trends.bins import Extremes, Numbers
from msprobe_engine.report.trends.findings import KEPT, moment, over_ranks
from msprobe_engine.report.trends.model import Grid, Metric, StandOut, Trends
from msprobe_engine.report.trends.sources.source import ABSMAX, SCALARS, VALUE

APART, APART_EXACT = 1e-3, 1e-6
"""Relative difference from which two runs are apart: the second where they agree to it in their first common step, so that nothing but
what came later can have made a difference; the first where other devices or orders of sums make some from the beginning."""
_SIZES = (*COMPARED, ABSMAX, VALUE)
_COUNTS = ("nans", "infs")
_NOT_EQUAL = 4.0
"""Where only one of two numbers is finite; of finite ones the largest is 2, where their signs differ."""


def apart(trends: Trends) -> tuple[list[StandOut], float, int]:
    """Per target the first column in which two runs differ by more than a limit, in the order of a run; the limit; how many targets have a
    column in common."""
    steps = trends.plan.fine.first
    differences: dict[str, list[tuple[str, Numbers]]] = {}
    for metric in trends.metrics.values():
        differences[metric.name] = list(_differences(trends, metric))
    limit = APART_EXACT if _begins_equal([far for of in differences.values() for _, far in of]) else APART
    found: list[StandOut] = []
    compared = 0
    for name, of in differences.items():
        if not of:
            continue
        compared += int(np.any([np.isfinite(far).any(1) for _, far in of], axis=0).sum())
        hits = np.array([far > limit for _, far in of])
        for i in np.flatnonzero(hits.any((0, 2))).tolist():
            column = int(hits[:, i].any(0).argmax())
            sizes = [float(far[i, column]) if hit[i, column] else 0.0 for (_, far), hit in zip(of, hits)]
            largest = int(np.argmax(sizes))
            found.append(StandOut("runs", int(steps[column]), name, of[largest][0], i, min(sizes[largest], 1e300)))
    found.sort(key=lambda one: moment(one.step, one.metric, one.target, name=trends.metrics[one.metric].targets[one.target].name))
    return found[:KEPT], limit, compared


def of_one_run(trends: Trends) -> tuple[int, int]:
    """How many rows have numbers of a step or rank that one of two runs alone has, in columns where both have some; the first such step."""
    sums = [{key: grid.sums for key, grid in run.grids.items() if grid.sums is not None} for run in trends.runs]
    columns = [np.any([one.weight.any(0) for one in of.values()], axis=0) for of in sums if of]
    if len(columns) < 2:
        return 0, 0
    rows: set[tuple[str, int]] = set()
    first = len(columns[0])
    for (metric, statistic), one in sums[0].items():
        if (other := sums[1].get((metric, statistic))) is not None:
            both = np.logical_and(one.weight.any(1), other.weight.any(1)).reshape(-1, 1)  # rows that one run alone has are said apart
            targets, found = np.nonzero(~one.of_the_same(other) & (columns[0] & columns[1]) & both)
            rows.update((metric, target) for target in targets.tolist())
            first = min(first, int(found.min(initial=first)))
    return len(rows), int(trends.plan.fine.first[first]) if rows else 0


def _differences(trends: Trends, metric: Metric) -> Iterator[tuple[str, Numbers]]:
    """Of each statistic that both runs have, [targets, columns]; NaN where one of them has no number."""
    one, two = (run.grids for run in trends.runs)
    both = [s for s in metric.statistics if (metric.name, s) in one and (metric.name, s) in two]
    sizes = [s for s in both if s in _SIZES]
    largest = [(metric.name, s) for s in ("max", "min", ABSMAX) if s in both]
    for statistic in both:
        a, b = one[metric.name, statistic], two[metric.name, statistic]
        if statistic in _SIZES or statistic in _COUNTS or not sizes:  # columns of features have names of their own; all of them count
            far = _far(a, b, None)
        elif statistic == "mean" and largest:
            far = _far(a, b, [grids[key] for grids in (one, two) for key in largest])
        else:  # round-off moves it, and how far is not known
            far = _far(a, b, None)
            far = np.where(np.isnan(far), np.nan, np.where(far == _NOT_EQUAL, _NOT_EQUAL, 0.0))
        if metric.name == SCALARS:
            far[[i for i, target in enumerate(metric.targets) if OF_THE_MACHINE.search(target.name)]] = np.nan
        yield statistic, far


def _far(a: Grid, b: Grid, sizes: list[Grid] | None) -> Numbers:
    """By the extremes over the ranks, and by what the page puts together of the ranks that both runs have. Where one run has numbers of a
    step or rank that the other lacks, the extremes are of other numbers, and nothing is compared."""
    x, y = over_ranks(a), over_ranks(b)
    size = None if sizes is None else _largest([over_ranks(grid) for grid in sizes])
    far = np.maximum(_relative(x.high, y.high, size), _relative(x.low, y.low, size))
    if a.sums is not None and b.sums is not None:
        far = np.fmax(far, a.sums.distance(b.sums, _largest([x, y]) if size is None else size, _NOT_EQUAL))
        far[~a.sums.of_the_same(b.sums)] = np.nan
    far[x.missing | y.missing] = np.nan
    return far


def _largest(of: list[Extremes]) -> Numbers:
    """The largest size of the finite numbers in each cell."""
    found: Numbers = np.zeros(of[0].high.shape)
    for one in of:
        for side in (one.high, one.low):
            found = np.maximum(found, np.where(np.isfinite(side), np.abs(side), 0.0))
    return found


def _begins_equal(differences: list[Numbers]) -> bool:
    """Whether two runs agree in the first column that both have."""
    common = [np.flatnonzero(np.isfinite(far).any(0))[:1] for far in differences]
    first = min((int(columns[0]) for columns in common if len(columns)), default=None)
    return first is not None and all(not (far[:, first] > APART_EXACT).any() for far in differences)


def _relative(a: Numbers, b: Numbers, size: Numbers | None) -> Numbers:
    """Difference against the larger of both, or `size` where that is more; `_NOT_EQUAL` where only one of them is finite, 0 where both are
    the same kind of not finite."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        larger = np.maximum(np.abs(a), np.abs(b))
        out = np.abs(a - b) / (larger if size is None else np.maximum(larger, size))
    out = np.where(a == b, 0.0, out)
    odd = np.isfinite(a) != np.isfinite(b)
    same = ~np.isfinite(a) & ~np.isfinite(b)
    differ = same & ~((np.isnan(a) & np.isnan(b)) | (a == b))
    return np.where(odd | differ, _NOT_EQUAL, np.where(same, 0.0, out))
