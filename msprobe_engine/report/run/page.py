"""One html page of a run that needs no network: curves per family with a heat map of layers and ranks, alerts, worst layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.output_files import replace_file
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.report.run.data import Progress, collect
from msprobe_engine.report.web.page import page
from msprobe_engine.report.web.words import needs_scripts, words


def render(data: dict[str, Any]) -> bytes:
    """The page of what `data.collect` gave."""
    alerts = sum(data["rules"].values())
    critical = any(row["severity"] == "critical" for row in data["timeline"])
    pieces = page(
        f"Run {data['run']}",
        headline=words("monitor", f"headline_{'none' if not alerts else 'one' if alerts == 1 else 'many'}", data["run"], alerts),
        verdict=("bad" if critical else "warn") if alerts else None,
        kind="monitor",
        body=needs_scripts(),
        scripts=("monitor.js",),
        sections=("monitor",),
        data=[("run", json.dumps(data, separators=(",", ":"), allow_nan=False).encode())],
    )
    return b"".join(pieces)


def write_report(run: Run, path: Path, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Write the page of `run` to `path` (replaced as a whole, mode 0640) and return its data.

    Raises:
        UsageError: the run holds nothing to show.
        SinkError: the file cannot be written.
    """
    data = collect(run, progress)
    replace_file(path, render(data))
    return data
