"""What a page holds, in a few lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msprobe_engine.core.text.ranges import ranges_of
from msprobe_engine.core.text.words import many
from msprobe_engine.report.trends.findings import KEPT
from msprobe_engine.report.trends.model import NonFinite, RunTrend, StandOut, Trends

_SHOWN = 5
_WORDS = {
    "jump": "{0:.4g} times its median",
    "fall": "1/{0:.4g} of its median",
    "ranks": "ranks {0:.4g} times further apart than usual, farthest {1}",
    "rank": "{1}: {0:.4g} times the other ranks",
    "rank_low": "{1}: 1/{0:.4g} of the other ranks",
}


def headline(trends: Trends) -> str:
    """The first line: what is wrong, and where, of one run or of two."""
    for run in trends.runs:
        if run.nonfinite:
            return f"First {_nonfinite_line(trends, run.nonfinite[0])}{_of(trends, run)}"
    if trends.apart:
        return f"First difference: {_stand_out_line(trends, trends.apart[0])}"
    if len(trends.runs) > 1:
        if not trends.compared:
            return "Nothing was compared: the runs have no numbers in common"
        return f"No relative difference above {trends.limit:g} in {many(trends.compared, 'row')}"
    (run,) = trends.runs
    alerts = sum(run.raised.rules.values())
    if alerts:
        return f"{many(alerts, 'alert')}: " + ", ".join(f"{rule} {count:,}" for rule, count in sorted(run.raised.rules.items()))
    if run.stand_out:
        return f"No alert, no NaN or Inf; farthest from its usual size: {_stand_out_line(trends, run.stand_out[0])}"
    return "No alert, no NaN or Inf, nothing far from its usual size"


def _of(trends: Trends, run: RunTrend) -> str:
    return f" in {run.name}" if len(trends.runs) > 1 else ""


def lines(trends: Trends) -> Iterator[str]:
    """Runs, how finely they are shown, what stands out first."""
    for run in trends.runs:
        count, first, last = run.steps
        read = f"{run.rows:,} rows from {', '.join(run.kinds)}"
        yield f"{run.name}: {many(len(run.ranks), 'rank')}, {many(count, 'step')} ({first} to {last}), {read}"
    yield describe_resolution(trends)
    for run in trends.runs:
        yield from _nonfinite(trends, run)
        for rule, count in sorted(run.raised.rules.items()):
            yield f"{run.name}: {many(count, 'alert')} of rule {rule}"
    if len(trends.runs) > 1:
        counts = [run.facts.world or len(run.ranks) for run in trends.runs]
        if counts[0] != counts[1]:
            yield (
                f"the runs have {counts[0]} and {many(counts[1], 'rank')}: where their parallel layouts differ, numbers of pieces are set "
                "against numbers of other pieces here; msprobe diagnose RUN GOLDEN puts the pieces together first"
            )
        yield from _format_stand_outs(trends, trends.apart, f"runs apart by more than {trends.limit:g}")
        if not trends.compared:
            yield "the runs have no numbers in common: nothing was compared (--shift moves the steps of the second)"
        elif not trends.apart:
            yield f"the runs agree: no relative difference above {trends.limit:g} in {many(trends.compared, 'row')}"
            yield "no shape and no dtype was compared, and of calls in a step the extremes; msprobe diagnose compares more"
    for run in trends.runs:
        yield from _format_stand_outs(trends, run.stand_out, f"{run.name}: stand out")
        for sentence, count in list(run.problems.items())[:_SHOWN]:
            yield f"note: {sentence}" + (f" ({count})" if count > 1 else "")
        if len(run.problems) > _SHOWN:
            yield f"and {len(run.problems) - _SHOWN} more; the page lists them"


def describe_resolution(trends: Trends) -> str:
    """How finely the page shows its numbers."""
    plan = trends.plan
    targets = sum(len(metric.targets) for metric in trends.metrics.values())
    text = f"{many(targets, 'target')} of {many(len(trends.metrics), 'metric')}; "
    if plan.fine.single and plan.ranks.single and plan.factor == 1:
        return f"{text}every step and rank is kept"
    text += f"{plan.fine.of} steps in {len(plan.fine)} columns"
    if plan.overview:
        text += f", per rank in {len(plan.coarse)}"
    if not plan.ranks.single:
        text += f", {plan.ranks.of} ranks in {len(plan.ranks)} groups"
    return f"{text}; of each the largest and the smallest number are kept (--size, --target, --step for more)"


def _nonfinite(trends: Trends, run: RunTrend) -> Iterator[str]:
    if run.nonfinite_count:
        yield f"{run.name}: NaN or Inf in {many(run.nonfinite_count, 'target')}, first:"
    for one in run.nonfinite[:_SHOWN]:
        yield f"  {_nonfinite_line(trends, one)} ({', '.join(one.statistics)})"


def _nonfinite_line(trends: Trends, one: NonFinite) -> str:
    target = trends.metrics[one.metric].targets[one.target].shown
    return f"{one.kind}: step {one.step}, rank{'s' if len(one.ranks) > 1 else ''} {runs_of(one.ranks)}, {target} ({one.metric})"


def _format_stand_outs(trends: Trends, outliers: list[StandOut], headline: str) -> Iterator[str]:
    if outliers:
        yield f"{headline}: {len(outliers)}{' or more' if len(outliers) >= KEPT else ''}, first:"
    for outlier in outliers[:_SHOWN]:
        yield f"  {_stand_out_line(trends, outlier)}"


def _stand_out_line(trends: Trends, one: StandOut) -> str:
    target = trends.metrics[one.metric].targets[one.target].shown
    apart = "only one of them is finite" if one.factor > 2 else "relative difference {0:.2g}"
    text = _WORDS.get(one.what, apart).format(one.factor, trends.plan.rank_text(one.rank) if one.rank >= 0 else "")
    return f"step {one.step}: {target} ({one.metric}, {one.statistic}): {text}"


def runs_of(numbers: Iterable[int]) -> str:
    """Numbers as ranges: ``0-2,5``."""
    return ",".join(ranges_of(sorted(numbers)))
