"""The trends page: one html file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from msprobe_engine.core.io.output_files import replace_file
from msprobe_engine.report.trends.collect import NUMBERS, collect
from msprobe_engine.report.trends.model import Trends
from msprobe_engine.report.trends.page_data import islands
from msprobe_engine.report.trends.sources.source import Progress, Source
from msprobe_engine.report.web.page import Verdict, page
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
