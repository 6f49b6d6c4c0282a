"""Reads one or two runs into one grid, in two passes: what there is, then the numbers. Memory is that of the page and one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import FAMILIES
from msprobe_engine.core.text.ranges import ranks_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.monitor.number_pairs import COMPARED, is_compared
from msprobe_engine.formats.monitor.series import Floats, Integers
from msprobe_engine.report.trends import findings
from msprobe_engine.report.trends.alerts import Raised
from msprobe_engine.report.trends.bins import Extremes, Numbers, Sums, distinct
from msprobe_engine.report.trends.findings import KEPT, moment, over_ranks
from msprobe_engine.report.trends.model import Grid, Metric, RunTrend, StandOut, Trends
from msprobe_engine.report.trends.pairing import pair_rows
from msprobe_engine.report.trends.plan import Plan, plan
from msprobe_engine.report.trends.sources.dumps import DumpSource
from msprobe_engine.report.trends.sources.monitored import MonitorSource
from msprobe_engine.report.trends.sources.order import Order, in_order
from msprobe_engine.report.trends.sources.source import (
    ABSMAX,
    DUMPED,
    SCALARS,
    VALUE,
    Both,
    Part,
    Progress,
    Source,
    Target,
    format_problems,
)

NUMBERS = 12_000_000
"""Numbers a page holds unless asked otherwise: about 30 to 50 MB."""
_FIRST = ("norm", ABSMAX, "max", "min", "mean")


@dataclass
class _Seen:
    """What the first pass finds in a metric."""

    targets: Order[Target] = field(default_factory=Order)
    statistics: dict[str, None] = field(default_factory=dict)


def collect(sources: Sequence[Source], *, numbers: int = NUMBERS, shift: int = 0, progress: Progress = lambda _: None) -> Trends:
    """Everything of one or two runs, in a grid of at most about `numbers` cells.

    Args:
        shift: added to the steps of the second run.
        progress: told what is read next.

    Raises:
        UsageError: there is nothing to show.
    """
    seen: list[dict[str, _Seen]] = []
    steps: list[npt.NDArray[np.int64]] = []
    runs: list[RunTrend] = []
    doubled = False
    _unwrap(sources)
    for number, source in enumerate(sources):
        run = RunTrend(_name(source, sources), str(source.path), source.kinds, [])
        dump = _dump_of(source)
        run.unwrapped = dump is not None and dump.unwrap > 0
        own_steps: list[npt.NDArray[np.int64]] = []
        seen.append({})
        for rank in source.ranks:
            for part in source.parts(rank, progress):
                doubled = doubled or _repeats(part)
                metric_seen = seen[-1].setdefault(part.metric, _Seen())
                metric_seen.targets.add(part.targets)
                metric_seen.statistics.update(dict.fromkeys(part.values))
                own_steps.append(distinct(part.steps))
                run.rows += len(part.ids)
                if not run.ranks or run.ranks[-1] != rank:
                    run.ranks.append(rank)
        if not own_steps:
            reason = "nothing to show: no numbers of what was asked for (ranks, steps, metrics, targets)"
            raise UsageError(f"{source.path}: {reason}{format_problems(source.problems)}")
        if (monitored := next((part for part in _parts_of(source) if isinstance(part, MonitorSource)), None)) is not None:
            run.raised, run.facts = Raised.of(monitored.alerts()), monitored.facts()
        own = np.unique(np.concatenate(own_steps)) + (shift if number else 0)
        run.steps = (len(own), int(own[0]), int(own[-1]))
        steps.append(own)
        runs.append(run)
    joined, left_alone = _join_runs(seen, runs)
    if len(runs) == 2:
        left_alone = _apart_by_themselves(runs, steps) or left_alone
    metrics = {name: _metric(name, joined[name]) for name in sorted(joined, key=_place)}
    rows = sum(len(m.targets) * len(m.statistics) for m in metrics.values()) * len(sources)
    ranks = np.array(sorted({rank for run in runs for rank in run.ranks}), np.int64)
    how = plan(np.unique(np.concatenate(steps)), ranks, rows, numbers, doubled)
    trends = Trends(how, metrics, runs, shift, left_alone=left_alone)
    for number, (source, run) in enumerate(zip(sources, runs)):
        _fill(trends, run, source, shift if number else 0, progress)
        run.stand_out = findings.stand_out(trends, run)
    if len(runs) > 1:
        trends.apart, trends.limit, trends.compared = apart(trends)
        lone, step = of_one_run(trends)
        if lone:
            text = "{0} rows have numbers of a step or rank that one run alone has, the first at step {1}; there they were not compared"
            runs[0].problems[Sentence(text, f"{lone:,}", step)] = 1
            trends.left_alone = True
    return trends


def _dump_of(source: Source) -> DumpSource | None:
    """The dump of a run, alone or beside files of the monitor."""
    return next((part for part in _parts_of(source) if isinstance(part, DumpSource)), None)


def _parts_of(source: Source) -> Sequence[Source]:
    """What of a run is read: files of the monitor, a dump, or both."""
    return source.sources if isinstance(source, Both) else [source]


def _unwrap(sources: Sequence[Source]) -> None:
    """Of two dumps, one of a wrapped model and one of the bare one, have the first name its calls as the second does."""
    dumps = [_dump_of(source) for source in sources]
    depths = [dump.wrappers() if dump is not None and len(dumps) == 2 else None for dump in dumps]
    for dump, depth in zip(dumps, depths):
        least = min((other for other in depths if other is not None), default=None)
        if dump is not None and depth is not None and least is not None and None not in depths:
            dump.unwrap = depth - least


def _join_runs(seen: Sequence[dict[str, _Seen]], runs: Sequence[RunTrend]) -> tuple[dict[str, _Seen], bool]:
    """Rows of all runs by metric; what does not match between two runs is put among their problems, and whether one has some alone."""
    left_alone = False
    if len(seen) == 2:
        for of, run, names in zip(
            seen, runs, pair_rows(*({name: list(seen_metric.targets) for name, seen_metric in of.items()} for of in seen))
        ):
            run.names = names.of
            run.unwrapped = run.unwrapped or names.unwrapped
            for metric in {metric for metric, _ in names.of}:
                rows, of[metric].targets = of[metric].targets, Order()
                of[metric].targets.add(names.of.get((metric, row), row) for row in rows)
            if run.unwrapped:
                text = "'module.' taken off the front of the names of {0}, so that its rows are those of the other run"
                run.problems[Sentence(text, run.name)] = 1
            if names.unsharded:
                text = "'FSDP' taken off the class names of {0}; parameters and their gradients in its dump are pieces that one rank holds"
                run.problems[Sentence(text, run.name)] = 1
        rows_of = [{(name, target): None for name, seen_metric in of.items() for target in seen_metric.targets} for of in seen]
        for run, own_rows, other_rows in zip(runs, rows_of, reversed(rows_of)):
            if only := [row for row in own_rows if row not in other_rows]:
                left_alone = True
                metric, first_target = only[0]
                text = "rows only in {0}: {1}, the first: {2} ({3})"
                run.problems[Sentence(text, run.name, f"{len(only):,}", first_target.shown, metric)] = 1
        for run, of, other_of in zip(runs, seen, reversed(seen)):
            for metric in (metric for metric in of if metric in other_of):
                if lone := [s for s in of[metric].statistics if s not in other_of[metric].statistics]:
                    left_alone = True
                    run.problems[Sentence("statistics of {1} only in {0}, not compared: {2}", run.name, metric, ", ".join(lone))] = 1
    joined: dict[str, _Seen] = {}
    for of in seen:
        for name, seen_metric in of.items():
            joined_metric = joined.setdefault(name, _Seen())
            joined_metric.targets.add(seen_metric.targets)
            joined_metric.statistics.update(seen_metric.statistics)
    return joined, left_alone


def _apart_by_themselves(runs: Sequence[RunTrend], steps: Sequence[npt.NDArray[np.int64]]) -> bool:
    """Say what makes numbers of two runs differ, or keeps them from being compared, whatever the model does. True: there is something."""
    common = len(np.intersect1d(steps[0], steps[1]))
    for run, own in zip(runs, steps):
        if common < len(own):
            run.problems[Sentence("steps only in {0}: {1} of {2}", run.name, f"{len(own) - common:,}", f"{len(own):,}")] = 1
    target_ranks, golden_ranks = (len(run.ranks) for run in runs)
    if target_ranks != golden_ranks:
        text = "ranks: {1} in {0}, {2} in the other run; activations and calls are of a rank's own part of the batch, and may differ so"
        runs[0].problems[Sentence(text, runs[0].name, target_ranks, golden_ranks)] = 1
    elif runs[0].ranks != runs[1].ranks:
        text = "the runs have not the same ranks: {1} in {0}, {2} in the other run; numbers over all ranks were compared"
        runs[0].problems[Sentence(text, runs[0].name, *(ranks_text(run.ranks) for run in runs))] = 1
    return runs[0].ranks != runs[1].ranks or any(common < len(own) for own in steps)


def _name(source: Source, sources: Sequence[Source]) -> str:
    """The directory of a run; with the one above it where that alone says little, or the same of both runs."""
    path = source.path.resolve()
    plain = path.name in ("dump", "jsonl", "monitor", "trend") or path.suffix == ".db"
    if plain or any(other is not source and other.path.resolve().name == path.name for other in sources):
        return f"{path.parent.name}/{path.name}"
    return path.name


def _repeats(part: Part) -> bool:
    """Whether a target has several rows in a step."""
    ids, steps = part.ids, part.steps
    same = ids[1:] == ids[:-1]
    if bool((same & (steps[1:] == steps[:-1])).any()):
        return True
    if bool(((ids[1:] > ids[:-1]) | (same & (steps[1:] > steps[:-1]))).all()):
        return False
    order = np.lexsort((steps, ids))
    return bool(((ids[order][1:] == ids[order][:-1]) & (steps[order][1:] == steps[order][:-1])).any())


def _place(metric: str) -> tuple[int, str]:
    """Numbers of the steps first, then families in the order of the monitor, then passes of dumps."""
    if metric == SCALARS:
        return -1, ""
    order = (*FAMILIES, "forward", "backward", "recompute", "parameters_grad", "optimizer")
    family = metric.partition(",")[0]
    return order.index(family) if family in order else len(order), metric


def _metric(name: str, seen: _Seen) -> Metric:
    """Records of a dump stay in the order in which they ran; those of the monitor are put into that of the model."""
    statistics = sorted(seen.statistics, key=lambda s: _FIRST.index(s) if s in _FIRST else len(_FIRST))
    return Metric(name, list(seen.targets) if name in DUMPED else in_order(list(seen.targets)), statistics)


def _fill(trends: Trends, run: RunTrend, source: Source, shift: int, progress: Progress) -> None:
    how = trends.plan
    index = {name: {target: i for i, target in enumerate(m.targets)} for name, m in trends.metrics.items()}
    gathered = findings.Gathered()
    shared = {rank for rank in run.ranks if all(rank in other.ranks for other in trends.runs)} if len(trends.runs) > 1 else set()
    late = 0
    for rank in source.ranks:
        for part in source.parts(rank, progress):
            if run.names:
                part = replace(part, targets=[run.names.get((part.metric, target), target) for target in part.targets])
            places = index.get(part.metric, {})
            rows = np.array([places.get(target, -1) for target in part.targets], np.int64)[part.ids]
            steps = part.steps + shift
            known = (rows >= 0) & (steps >= how.fine.first[0]) & (steps <= how.fine.last[-1])
            if not known.all():  # a run that is still going has written more since it was first read
                late += int((~known).sum())
                part, rows, steps = part.of(known), rows[known], steps[known]
            fine = how.fine.place(steps)
            group = int(how.ranks.place(np.array([rank]))[0])
            flat = (rows * len(how.ranks) + group) * len(how.coarse) + fine // how.factor
            for statistic, values in part.values.items():
                grid = run.grids.get((part.metric, statistic))
                if grid is None:
                    grid = run.grids[part.metric, statistic] = _grid(how, len(places), compared=bool(shared))
                mask = part.there.get(statistic)
                cells = slice(None) if mask is None else mask
                _add(grid, rows[cells], fine[cells], flat[cells], values[cells])
                if grid.sums is not None and rank in shared:
                    grid.sums.add(rows[cells] * len(how.fine) + fine[cells], steps[cells], rank, values[cells])
            gathered.add(part, rows, steps)
    run.nonfinite, run.nonfinite_count = gathered.first(trends.metrics)
    run.problems |= source.problems
    if late:
        run.problems[Sentence("rows written while the page was made, not in it; make it again to see them")] = late


def _grid(how: Plan, targets: int, compared: bool) -> Grid:
    shape = targets, len(how.fine)
    overview = Extremes(shape) if how.overview else None
    return Grid(overview, Extremes((targets, len(how.ranks), len(how.coarse))), Sums(shape) if compared else None)


def _add(grid: Grid, rows: Integers, fine: Integers, flat: Integers, values: Floats) -> None:
    grid.cube.add(flat, values)
    if grid.overview is not None:
        grid.overview.add(rows * grid.overview.high.shape[1] + fine, values)


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
    outliers: list[StandOut] = []
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
            outliers.append(StandOut("runs", int(steps[column]), name, of[largest][0], i, min(sizes[largest], 1e300)))
    outliers.sort(
        key=lambda outlier: moment(
            outlier.step, outlier.metric, outlier.target, name=trends.metrics[outlier.metric].targets[outlier.target].name
        )
    )
    return outliers[:KEPT], limit, compared


def of_one_run(trends: Trends) -> tuple[int, int]:
    """How many rows have numbers of a step or rank that one of two runs alone has, in columns where both have some; the first such step."""
    sums = [{key: grid.sums for key, grid in run.grids.items() if grid.sums is not None} for run in trends.runs]
    columns = [np.any([grid_sums.weight.any(0) for grid_sums in of.values()], axis=0) for of in sums if of]
    if len(columns) < 2:
        return 0, 0
    rows: set[tuple[str, int]] = set()
    first = len(columns[0])
    for (metric, statistic), grid_sums in sums[0].items():
        if (other_sums := sums[1].get((metric, statistic))) is not None:
            # rows that one run alone has are said apart
            in_both = np.logical_and(grid_sums.weight.any(1), other_sums.weight.any(1)).reshape(-1, 1)
            targets, columns_of = np.nonzero(~grid_sums.of_the_same(other_sums) & (columns[0] & columns[1]) & in_both)
            rows.update((metric, target) for target in targets.tolist())
            first = min(first, int(columns_of.min(initial=first)))
    return len(rows), int(trends.plan.fine.first[first]) if rows else 0


def _differences(trends: Trends, metric: Metric) -> Iterator[tuple[str, Numbers]]:
    """Of each statistic that both runs have, [targets, columns]; NaN where one of them has no number."""
    target_grids, golden_grids = (run.grids for run in trends.runs)
    in_both = [s for s in metric.statistics if (metric.name, s) in target_grids and (metric.name, s) in golden_grids]
    sizes = [s for s in in_both if s in _SIZES]
    largest = [(metric.name, s) for s in ("max", "min", ABSMAX) if s in in_both]
    for statistic in in_both:
        target_grid, golden_grid = target_grids[metric.name, statistic], golden_grids[metric.name, statistic]
        if statistic in _SIZES or statistic in _COUNTS or not sizes:  # columns of features have names of their own; all of them count
            far = _far(target_grid, golden_grid, None)
        elif statistic == "mean" and largest:
            far = _far(target_grid, golden_grid, [grids[key] for grids in (target_grids, golden_grids) for key in largest])
        else:  # round-off moves it, and how far is not known
            far = _far(target_grid, golden_grid, None)
            far = np.where(np.isnan(far), np.nan, np.where(far == _NOT_EQUAL, _NOT_EQUAL, 0.0))
        if metric.name == SCALARS:
            far[[i for i, target in enumerate(metric.targets) if not is_compared(target.name)]] = np.nan
        yield statistic, far


def _far(target: Grid, golden: Grid, sizes: list[Grid] | None) -> Numbers:
    """By the extremes over the ranks, and by what the page puts together of the ranks that both runs have. Where one run has numbers of a
    step or rank that the other lacks, the extremes are of other numbers, and nothing is compared."""
    target_extremes, golden_extremes = over_ranks(target), over_ranks(golden)
    size = None if sizes is None else _largest([over_ranks(grid) for grid in sizes])
    far = np.maximum(_relative(target_extremes.high, golden_extremes.high, size), _relative(target_extremes.low, golden_extremes.low, size))
    if target.sums is not None and golden.sums is not None:
        sums = target.sums.distance(golden.sums, _largest([target_extremes, golden_extremes]) if size is None else size, _NOT_EQUAL)
        far = np.where(far > APART, far, np.fmax(far, sums))  # sums only tell that there is a difference, not how large it is
        far[~target.sums.of_the_same(golden.sums)] = np.nan
    far[target_extremes.missing | golden_extremes.missing] = np.nan
    return far


def _largest(of: list[Extremes]) -> Numbers:
    """The largest size of the finite numbers in each cell."""
    largest: Numbers = np.zeros(of[0].high.shape)
    for extremes in of:
        for side in (extremes.high, extremes.low):
            largest = np.maximum(largest, np.where(np.isfinite(side), np.abs(side), 0.0))
    return largest


def _begins_equal(differences: list[Numbers]) -> bool:
    """Whether two runs agree in the first column that both have."""
    common = [np.flatnonzero(np.isfinite(far).any(0))[:1] for far in differences]
    first = min((int(columns[0]) for columns in common if len(columns)), default=None)
    return first is not None and all(not (far[:, first] > APART_EXACT).any() for far in differences)


def _relative(target: Numbers, golden: Numbers, size: Numbers | None) -> Numbers:
    """Difference against the larger of both, or `size` where that is more; `_NOT_EQUAL` where only one of them is finite, 0 where both are
    the same kind of not finite."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        larger = np.maximum(np.abs(target), np.abs(golden))
        out = np.abs(target - golden) / (larger if size is None else np.maximum(larger, size))
    out = np.where(target == golden, 0.0, out)
    odd = np.isfinite(target) != np.isfinite(golden)
    same = ~np.isfinite(target) & ~np.isfinite(golden)
    differ = same & ~((np.isnan(target) & np.isnan(golden)) | (target == golden))
    return np.where(odd | differ, _NOT_EQUAL, np.where(same, 0.0, out))
