"""Write one HTML page of a monitored run that needs no network: the loss, alerts at their steps, heat maps and lines of layers, ranks and
steps, what stands out. It is the page of `msprobe trends`, of the monitor's files alone and small enough to be mailed."""

from __future__ import annotations

import argparse

EPILOG = """\
examples:
  msprobe monitor report runs/a                     writes runs/a/analysis/report-1/report.html
  msprobe monitor report runs/a/monitor -o a.html
  msprobe monitor report runs/a --since Nov21_09-00-00

exit codes: 0 done, and nothing is wrong on the page; 1 the page shows alerts or numbers that are not finite; 2 no data or wrong usage;
3 nothing of that, but something is missing or could not be read and is not on the page"""

MEGABYTES = 8.0
"""Of numbers on the page, 4 bytes each; `msprobe trends` holds more of a large run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the page, and a range of time."""
    parser.add_argument("run_path", metavar="RUN", help="output directory of a monitored run, or what is in it")
    parser.add_argument(
        "-o", "--output", default="", metavar="PATH", help="the page, or a directory for it (default: RUN/analysis/report-N)"
    )
    parser.add_argument("--since", metavar="STAMP", help="only directories from this time stamp on (MonDD_HH-MM-SS)")
    parser.add_argument("--until", metavar="STAMP", help="only directories up to this time stamp")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """The exit code, see `EPILOG`; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.cli.analysis.trends import place, write
    from msprobe_engine.report.trends.sources.open_source import open_monitor
    from msprobe_engine.report.trends.sources.source import Wanted

    source = open_monitor(args.run_path, Wanted(since=args.since, until=args.until))
    return write([source], place(args.run_path, args.output, "report.html"), size=MEGABYTES)
