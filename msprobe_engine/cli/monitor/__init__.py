"""Work with what the monitor of a run has written: CSV, JSON lines or a trend data base, ours or the existing tool's."""

from __future__ import annotations

from msprobe_engine.cli.main import Command

COMMANDS = {
    "analyze": Command("monitor.analyze", "put the alerts of all ranks into the order of execution and say where it began"),
    "csv2tb": Command("monitor.csv2tb", "convert monitor files into TensorBoard event files"),
    "learn": Command("monitor.learn", "learn bands and relations from healthy runs, for rule learned"),
    "report": Command("monitor.report", "write one HTML page of a run: loss, alerts, heat maps, lines, what stands out"),
}

EXAMPLES = """\
examples:
  msprobe monitor analyze monitor_output
  msprobe monitor report runs/a
  msprobe monitor analyze --help"""
