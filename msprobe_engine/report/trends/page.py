"""The trends page: one html file that needs nothing else.

The islands of a trends page: one manifest, and the numbers in blocks that are inflated when they are first shown.

A block is little-endian float32, or float64 where float32 would turn a number into another kind of number (0, infinity); its bytes are
shuffled (all first bytes, then all second bytes, ...), which gzip likes. Missing numbers are the NaN with the sign bit, real NaN the one
without. Largest come first, then, where the plan says so, smallest. Ids: ``o.RUN.METRIC.STATISTIC`` is an overview [targets, fine columns],
``c.RUN.METRIC.STATISTIC.BLOCK`` are targets of a cube [targets, ranks, coarse columns], `BLOCK` of about `BLOCK_CELLS` cells each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.io.output_files import replace_file
from msprobe_engine.report.trends.bins import Extremes
from msprobe_engine.report.trends.collect import NUMBERS, collect
from msprobe_engine.report.trends.model import Metric, NonFinite, RunTrend, StandOut, Trends
from msprobe_engine.report.trends.sources.source import SCALARS, Progress, Source
from msprobe_engine.report.trends.summary import runs_of
from msprobe_engine.report.web.page import Verdict, page
from msprobe_engine.report.web.sentences import both
from msprobe_engine.report.web.words import needs_scripts

_SCRIPTS = tuple(f"trends/{name}.js" for name in ("texts", "store", "plot", "course", "heat", "lines", "lists", "main"))


def render(trends: Trends) -> bytes:
    """The page of what `collect` gave."""
    names = [run.name for run in trends.runs]
    title = " · ".join(names)
    body = f'<div id="trends"></div>{needs_scripts()}'
    pieces = page(
        title,
        kind="trends",
        body=body,
        styles=("trends/trends.css",),
        scripts=_SCRIPTS,
        data=islands(trends),
        verdict=_verdict(trends),
        app=True,
    )
    return b"".join(pieces)


def _verdict(trends: Trends) -> Verdict | None:
    """The sign beside the title; that nothing was found is no good news by itself, so there is none then."""
    if any(run.nonfinite_count or any(alert.get("severity") == "critical" for alert in run.raised.began) for run in trends.runs):
        return "bad"
    return "warn" if trends.apart or any(run.raised.began for run in trends.runs) else None


def write_trends(
    sources: list[Source], path: Path, *, numbers: int = NUMBERS, shift: int = 0, progress: Progress = lambda _: None
) -> Trends:
    """Write the page of one or two runs to `path` (replaced as a whole, mode 0640).

    Raises:
        UsageError: there is nothing to show.
        SinkError: the file cannot be written.
    """
    trends = collect(sources, numbers=numbers, shift=shift, progress=progress)
    replace_file(path, render(trends))
    return trends


BLOCK_CELLS = 1 << 20
_HALF = np.finfo(np.float32)


def islands(trends: Trends) -> Iterator[tuple[str, bytes]]:
    """Everything that the page holds, the manifest first."""
    text = json.dumps(manifest(trends), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    yield "manifest", text.encode("utf-8", "backslashreplace")
    for run_number, run in enumerate(trends.runs):
        for metric_number, metric in enumerate(trends.metrics.values()):
            for statistic_number, statistic in enumerate(metric.statistics):
                grid = run.grids.get((metric.name, statistic))
                if grid is None:
                    continue
                if grid.overview is not None:
                    yield f"o.{run_number}.{metric_number}.{statistic_number}", _pack_extremes(grid.overview, slice(None), True)
                per = block_targets(trends)
                for block, begin in enumerate(range(0, len(metric.targets), per)):
                    yield (
                        f"c.{run_number}.{metric_number}.{statistic_number}.{block}",
                        _pack_extremes(grid.cube, slice(begin, begin + per), trends.plan.spread),
                    )


def block_targets(trends: Trends) -> int:
    return max(1, BLOCK_CELLS // max(1, len(trends.plan.ranks) * len(trends.plan.coarse)))


def manifest(trends: Trends) -> dict[str, Any]:
    """What the page knows before it opens a block."""
    index = {name: i for i, name in enumerate(trends.metrics)}
    return {
        "plan": trends.plan.to_json(),
        "numbers": trends.plan.numbers,
        "wanted": trends.plan.wanted,
        "block": block_targets(trends),
        "shift": trends.shift,
        "metrics": [_metric(metric) for metric in trends.metrics.values()],
        "runs": [_run(trends, run, index) for run in trends.runs],
        "limit": trends.limit,
        "compared": trends.compared,
        "apart": [_stand_out(trends, outlier, index) for outlier in trends.apart],
    }


def _metric(metric: Metric) -> dict[str, Any]:
    """Names of a metric; but for the numbers of the steps, which have none, the layers, too, and which target is in which."""
    found: dict[str, Any] = {"name": metric.name, "statistics": metric.statistics, "targets": [target.shown for target in metric.targets]}
    if metric.name != SCALARS:
        layers: dict[str, int] = {}
        found["layerOf"] = [layers.setdefault(target.layer, len(layers)) for target in metric.targets]
        found["layers"] = list(layers)
    return found


def _run(trends: Trends, run: RunTrend, index: dict[str, int]) -> dict[str, Any]:
    metrics = list(trends.metrics.values())
    return {
        "name": run.name,
        "path": run.path,
        "kinds": list(run.kinds),
        "ranks": run.ranks,
        "steps": list(run.steps),
        "rows": run.rows,
        "there": [[(metric.name, statistic) in run.grids for statistic in metric.statistics] for metric in metrics],
        "nonfinite": [_nonfinite(trends, finding, index) for finding in run.nonfinite],
        "nonfiniteCount": run.nonfinite_count,
        "alerts": run.raised.rows(),
        "alertCount": len(run.raised.began),
        "alertsLeftOut": run.raised.left_out,
        "meanings": run.raised.meanings(),
        "lanes": run.raised.lanes(trends.plan.fine.first, trends.shift if run is not trends.runs[0] else 0),
        "facts": run.facts.as_json(),
        "standOut": [_stand_out(trends, finding, index) for finding in run.stand_out],
        "problems": [[both(sentence), count] for sentence, count in list(run.problems.items())[:200]],
        "problemCount": len(run.problems),
    }


def _nonfinite(trends: Trends, one: NonFinite, index: dict[str, int]) -> list[Any]:
    statistics = trends.metrics[one.metric].statistics
    shown = [statistics.index(name) for name in one.statistics if name in statistics]
    return [one.step, one.ranks[0], runs_of(one.ranks)[:200], index[one.metric], one.target, one.kind, shown, one.last, one.steps]


def _stand_out(trends: Trends, one: StandOut, index: dict[str, int]) -> list[Any]:
    statistic = trends.metrics[one.metric].statistics.index(one.statistic)
    return [one.what, one.step, index[one.metric], statistic, one.target, float(f"{one.factor:.4g}"), one.rank]


def _pack_extremes(extremes: Extremes, rows: slice, spread: bool) -> bytes:
    high, low = extremes.high[rows], extremes.low[rows]
    missing = (high == -np.inf) & (low == np.inf)
    planes = [high, low] if spread else [high]
    narrow = all(fits(plane[~missing]) for plane in planes)
    parts = [_bits(plane, missing, narrow) for plane in planes]
    whole = np.concatenate(parts)
    size = whole.dtype.itemsize
    shuffled: bytes = whole.view(np.uint8).reshape(-1, size).T.tobytes()
    return bytes([size]) + shuffled


def fits(values: npt.NDArray[np.float64]) -> bool:
    """Whether float32 keeps what kind of number each is: no finite one becomes infinite, none other than 0 becomes 0."""
    sizes = np.abs(values[np.isfinite(values)])
    return not len(sizes) or bool(sizes.max() <= _HALF.max and not ((sizes > 0) & (sizes < float(_HALF.smallest_subnormal))).any())


def _bits(values: npt.NDArray[np.float64], missing: npt.NDArray[np.bool_], narrow: bool) -> npt.NDArray[Any]:
    out = values.astype("<f4" if narrow else "<f8").reshape(-1)
    out[np.isnan(out)] = np.nan  # one kind of NaN
    bits = out.view("<u4" if narrow else "<u8")
    bits[missing.reshape(-1)] = 0xFFC00000 if narrow else 0xFFF8000000000000
    return bits
