"""One HTML page of a run that needs no network: curves per family with a heat map of layers and ranks, alerts, worst layers."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from msprobe_engine.monitor.reader import Run
from msprobe_engine.monitor.report_data import Progress, collect
from msprobe_engine.sinks.files import replace_file

_HERE = Path(__file__).parent

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
<h1>{title}</h1>
<p>Made by msprobe monitor report. Hover over a picture to read its numbers.</p>
<div id="page"></div>
<div id="tip"></div>
<script type="application/json" id="data">{data}</script>
<script>
{js}</script>
</body>
</html>
"""


def render(data: dict[str, Any]) -> str:
    """The page of what `report_data.collect` gave. Whatever the run calls its tensors stays text: the JSON can end no script."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for mark in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return _PAGE.format(
        title=html.escape(f"Run {data['run']}"), css=(_HERE / "report.css").read_text(), js=(_HERE / "report.js").read_text(), data=text
    )


def write_report(run: Run, path: Path, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Write the page of `run` to `path` (replaced as a whole, mode 0640) and return its data.

    Raises:
        UsageError: the run holds nothing to show.
        SinkError: the file cannot be written.
    """
    data = collect(run, progress)
    replace_file(path, render(data).encode())
    return data
