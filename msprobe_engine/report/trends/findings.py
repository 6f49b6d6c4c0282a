"""What stands out: numbers that are not finite, targets that leave their own median, ranks and runs that go apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from msprobe_engine.report.trends.bins import Extremes
from msprobe_engine.report.trends.model import Grid, Metric, NonFinite, RunTrend, StandOut, Trends
from msprobe_engine.report.trends.sources.source import ABSMAX, DUMPED, SCALARS, VALUE, Part

KEPT = 200
"""Findings of a kind that a page lists."""
NOTABLE = 3.0
"""Factor from which a target stands out."""
_BEGINNING = 20
"""The first of so many parts of a run is not looked at for jumps: optimizers and losses begin far from where they stay."""
_LEADING = ("norm", ABSMAX, VALUE, "max")
_FILLING = ("exp_avg", "exp_avg_sq", "opt_state", "param_origin", "param_updated")
"""Families whose tensors begin at zero, or may, and fill: that they are small in the first steps is no news in any run."""
_LOSS, _NORM = "loss", "grad_norm"
"""Numbers of a step that have their place within it."""
_BACKWARDS = ("actv_grad", "backward", "grad_unreduced", "parameters_grad", "grad_reduced")
_MOMENTS = ("param_origin", "actv", "forward", "recompute", _LOSS, *_BACKWARDS, _NORM)
"""Families in the order in which a step makes them, those of the backward pass from the last layer to the first; all others come later, the
other numbers of the steps last."""
_CALLS = 1 << 40
"""More than a step has."""
Numbers = npt.NDArray[np.float64]


class Gathered:
    """Targets with NaN or Inf while a run is read."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str, int], NonFinite] = {}

    def add(self, part: Part, rows: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> None:
        """Take a part; `rows`: target of each row, `steps`: on the axis of the page."""
        masks: dict[str, npt.NDArray[np.bool_]] = {}
        for statistic, values in part.values.items():
            if statistic != ABSMAX:
                mask = values > 0 if statistic in ("nans", "infs") else ~np.isfinite(values)
                present = part.there.get(statistic)
                mask = mask if present is None else mask & present
                mask = mask & ~part.masked if len(part.masked) else mask
                if mask.any():
                    masks[statistic] = mask
        if not masks:
            return
        bad, nan = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
        for statistic, mask in masks.items():
            bad |= mask
            nan |= mask & (np.isnan(part.values[statistic]) | (statistic == "nans"))
        positions = np.flatnonzero(bad)
        order = positions[np.lexsort((steps[positions], rows[positions]))]
        targets, begins, counts = np.unique(rows[order], return_index=True, return_counts=True)
        for target, begin, count in zip(targets.tolist(), begins.tolist(), counts.tolist()):
            own_rows = order[begin : begin + count]
            i = int(own_rows[0])
            when = int(part.order[own_rows[steps[own_rows] == steps[i]]].min()) if len(part.order) else -1
            shown = tuple(statistic for statistic, mask in masks.items() if mask[i])
            last, many = int(steps[own_rows[-1]]), len(np.unique(steps[own_rows]))
            place = int(steps[i]), part.metric, target
            old = self._found.get(place)
            if old is not None:
                ranks = old.ranks if part.rank in old.ranks else (*old.ranks, part.rank)
                self._found[place] = old._replace(
                    ranks=ranks, last=max(last, old.last), steps=max(many, old.steps), order=min(when, old.order)
                )
            else:
                kind = "NaN" if nan[i] else "Inf"
                self._found[place] = NonFinite(int(steps[i]), (part.rank,), part.metric, target, kind, shown, last, many, when)

    def first(self, metrics: Mapping[str, Metric]) -> tuple[list[NonFinite], int]:
        """The earliest in the order of execution, and how many there are."""

        def when(one: NonFinite) -> tuple[int, int, int]:
            return moment(one.step, one.metric, one.target, one.order, metrics[one.metric].targets[one.target].name)

        return sorted(self._found.values(), key=when)[:KEPT], len(self._found)


def over_ranks(grid: Grid) -> Extremes:
    """Extremes over the ranks, [targets, columns], as fine as the page has them."""
    if grid.overview is not None:
        return grid.overview
    out = Extremes((0,))
    out.high, out.low = grid.cube.high.max(1), grid.cube.low.min(1)
    return out


def _find_leading_statistics(trends: Trends) -> Iterable[tuple[str, str]]:
    """The one statistic of each metric that is looked at for jumps."""
    for metric in trends.metrics.values():
        found = next((s for s in _LEADING if s in metric.statistics), None)
        if found is not None:
            yield metric.name, found


def stand_out(trends: Trends, run: RunTrend) -> list[StandOut]:
    """Targets with the largest factor between a column and their own median, or between ranks that usually agree better."""
    outliers: list[StandOut] = []
    steps = trends.plan.fine.first
    for metric, statistic in _find_leading_statistics(trends):
        grid = run.grids.get((metric, statistic))
        if grid is None or metric == SCALARS:
            continue
        extremes = over_ranks(grid)
        logs = _logs(extremes.high)
        usable = np.isfinite(logs).sum(1) >= 3
        far = np.nan_to_num(logs - _median(logs)[:, None], nan=0.0)
        if metric.partition(",")[0] in _FILLING:
            far = np.maximum(far, 0.0)
        if metric in DUMPED:
            far = _without_filling(far)
        far[~usable] = 0.0
        far[:, : far.shape[1] // _BEGINNING] = 0.0
        outliers += _top(far, metric, statistic, steps, "jump", "fall")
        if len(run.ranks) > 1:
            width = logs - _logs(extremes.low)
            usual = np.maximum(_median(width), 0.0)[:, None]
            of_ranks = _of_ranks(grid)
            wide = _top(np.nan_to_num(width - usual, nan=0.0, posinf=0.0, neginf=0.0), metric, statistic, steps, "ranks", "ranks")
            outliers += [outlier._replace(rank=_farthest(trends, of_ranks, outlier)) for outlier in wide]
            outliers += _alone(trends, of_ranks, metric, statistic, {outlier.target for outlier in wide})
    outliers.sort(key=lambda outlier: -outlier.factor)
    return outliers[:KEPT]


def _of_ranks(grid: Grid) -> Numbers:
    """[targets, groups of ranks, coarse columns]: power of ten between a number and the median of the ranks, of two ranks the smaller one;
    0 where there is none."""
    logs = _logs(grid.cube.high)
    ascending = np.sort(logs, axis=1)  # what is not finite is last
    count = np.isfinite(logs).sum(1, keepdims=True)
    middle, above = (np.maximum(count - 1, 0) // 2, count // 2) if logs.shape[1] > 2 else (np.zeros_like(count), np.zeros_like(count))
    above = np.minimum(above, np.maximum(count - 1, 0))
    usual = (np.take_along_axis(ascending, middle, 1) + np.take_along_axis(ascending, above, 1)) / 2
    return np.nan_to_num(logs - usual, nan=0.0)


def _farthest(trends: Trends, of_ranks: Numbers, one: StandOut) -> int:
    """The rank that is farthest from the others where a target stands out; of a group of them the first."""
    column = int(trends.plan.coarse.place(np.array([one.step]))[0])
    return int(trends.plan.ranks.first[int(np.abs(of_ranks[one.target, :, column]).argmax())])


def _alone(trends: Trends, of_ranks: Numbers, metric: str, statistic: str, known: Collection[int]) -> list[StandOut]:
    """Targets with a rank that is far from the others, also where it always is."""
    targets, ranks, columns = of_ranks.shape
    far = of_ranks.reshape(targets, ranks * columns)
    steps = np.tile(trends.plan.coarse.first, ranks)
    outliers = []
    for outlier in _top(far, metric, statistic, np.arange(ranks * columns), "rank", "rank_low"):
        if outlier.target not in known:
            rank = int(trends.plan.ranks.first[outlier.step // columns])
            outliers.append(outlier._replace(step=int(steps[outlier.step]), rank=rank))
    return outliers


def _without_filling(far: Numbers) -> Numbers:
    """A dump has counters and moments of the optimizer, and parameters that began at zero, among all others: of its rows a fall is only
    what lies behind a column above the median."""
    return np.where(np.logical_or.accumulate(far > 0, axis=1), far, 0.0)


def _top(far: Numbers, metric: str, statistic: str, steps: npt.NDArray[np.int64], up: str, down: str) -> list[StandOut]:
    if not far.size:
        return []
    at = np.abs(far).argmax(1)
    best = far[np.arange(len(far)), at]
    chosen = np.flatnonzero(np.abs(best) >= np.log10(NOTABLE))
    chosen = chosen[np.argsort(-np.abs(best[chosen]), kind="stable")][:KEPT]
    return [
        StandOut(up if best[i] > 0 else down, int(steps[at[i]]), metric, statistic, i, float(10 ** min(abs(best[i]), 300)))
        for i in chosen.tolist()
    ]


def _logs(values: Numbers) -> Numbers:
    with np.errstate(divide="ignore", invalid="ignore"):
        out: Numbers = np.log10(np.where(np.isfinite(values) & (values > 0), values, np.nan))
    return out


def _median(values: Numbers) -> Numbers:
    """Of every row, 0 where there is nothing."""
    out = np.zeros(len(values))
    some = np.isfinite(values).any(1)
    out[some] = np.nanmedian(values[some], axis=1)
    return out


def moment_of(metrics: Iterable[str]) -> list[int]:
    """When the calls of a step were made, of those in the order in which a dump has them. Numbers of calls ascend, and lie where those of
    `_MOMENTS` do: a call of an optimizer between two backward passes comes behind the first one, whatever its metric."""
    found, latest = [], 0
    for number, metric in enumerate(metrics):
        latest = max(latest, _place(metric))
        found.append(latest * _CALLS + number)
    return found


def _place(metric: str, name: str = "") -> int:
    family = metric.partition(",")[0]
    if metric == SCALARS and (name == _LOSS or name.endswith((" loss", "_loss", ".loss", "/loss"))):
        family = _LOSS
    elif metric == SCALARS and name.endswith(_NORM):
        family = _NORM
    return _MOMENTS.index(family) if family in _MOMENTS else len(_MOMENTS) + (metric == SCALARS)


def moment(step: int, metric: str, target: int, order: int = -1, name: str = "") -> tuple[int, int, int]:
    """When in the run a number was made: of two layers the one that is computed first comes first.

    Args:
        order: of a call of a dump, see `moment_of`; -1: the file does not say.
        name: of the target, which tells the numbers of a step apart.
    """
    if order >= 0:
        return step, *divmod(order, _CALLS)
    place = _place(metric, name)
    backwards = place < len(_MOMENTS) and _MOMENTS[place] in _BACKWARDS
    return step, place, -target if backwards else target
