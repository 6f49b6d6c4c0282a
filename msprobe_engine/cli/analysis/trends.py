"""Write one HTML page of how the numbers of a run went, or of two runs beside each other: heat maps of steps, ranks and layers, and lines.
Reads what the monitor wrote, trend data bases and dumps of several steps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msprobe_engine.report.trends.sources.source import Source

EPILOG = """\
examples:
  msprobe trends runs/a                                  writes runs/a/analysis/trends-1/trends.html
  msprobe trends RUN GOLDEN -o two.html                  two runs, and where they differ first
  msprobe trends runs/a --metric grad_reduced --target layers.3. --rank 0-7
  msprobe trends trend/monitor_data.trend.db

The page holds every step and rank where --size allows; else neighbouring steps, then ranks, are put together, and the largest and the
smallest number of a group stay. NaN and Inf always do.

Of two runs all statistics that both have are compared, of the ranks and steps that both have.

exit codes: 0 done, and nothing is wrong on the page; 1 it shows alerts or numbers that are not finite, or two runs are apart; 2 no data or
wrong usage; 3 nothing of that, but something is missing or could not be read, or only one of two runs has it"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The runs, the page, and what of them is wanted."""
    parser.add_argument("run_path", metavar="RUN", help="monitored run, dump, or trend data base")
    parser.add_argument("other_path", metavar="GOLDEN", nargs="?", help="the run that RUN is compared with")
    parser.add_argument(
        "-o", "--output", default="", metavar="PATH", help="the page, or a directory for it (default: RUN/analysis/trends-N)"
    )
    parser.add_argument("--metric", action="append", default=[], metavar="TEXT", help="only metrics with this in their name; repeatable")
    parser.add_argument(
        "--statistic", action="append", default=[], metavar="TEXT", help="only statistics with this in their name; repeatable"
    )
    parser.add_argument("--target", action="append", default=[], metavar="TEXT", help="only tensors with this in their name; repeatable")
    parser.add_argument("--rank", metavar="RANGE", help="only these ranks: 0,2 or 0-7")
    parser.add_argument("--step", metavar="RANGE", help="only these steps: 10,12 or 100-200")
    parser.add_argument("--since", metavar="STAMP", help="only directories from this time stamp on (MonDD_HH-MM-SS)")
    parser.add_argument("--until", metavar="STAMP", help="only directories up to this time stamp")
    parser.add_argument("--shift", type=int, default=0, metavar="N", help="add N to the steps of GOLDEN")
    parser.add_argument("--micro_steps", action="store_true", help="micro batches as rows of their own (default: their extremes)")
    parser.add_argument("--size", type=float, default=48.0, metavar="MB", help="numbers that the page may hold (default: 48)")
    parser.add_argument("--scheduler", default="", metavar="ADDRESS", help="a running Dask cluster (tcp://host:8786)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """The exit code, see `EPILOG`; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.align.sources import numbers
    from msprobe_engine.cli.options.inputs import warn_same_files
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.core.process.jobs import cluster
    from msprobe_engine.report.trends.sources.open_source import open_source
    from msprobe_engine.report.trends.sources.source import Wanted

    if not 0 < args.size < 4096:
        raise UsageError(f"--size is {args.size:g}; allowed: more than 0, less than 4096 MB")
    wanted = Wanted(
        ranks=numbers(args.rank, "--rank") or None,
        steps=numbers(args.step, "--step") or None,
        metrics=tuple(args.metric),
        statistics=tuple(args.statistic),
        targets=tuple(args.target),
        micro_steps=args.micro_steps,
        since=args.since,
        until=args.until,
    )
    paths = [args.run_path, *([args.other_path] if args.other_path else [])]
    warn_same_files(args.run_path, args.other_path)
    sources = [open_source(path, wanted, args.scheduler) for path in paths]
    page = place(args.run_path, args.output, "trends.html")
    with cluster(args.scheduler):
        code = write(sources, page, size=args.size, shift=args.shift)
    if args.open:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    return code


def place(run: str, output: str, name: str) -> Path:
    """Where the page is written: a name that ends in .html is the page, any other one a directory for it."""
    from msprobe_engine.cli.options.outputs import is_page_name, results_directory
    from msprobe_engine.core.io.output_files import make_directory

    if is_page_name(output):
        return Path(output)
    if output:
        make_directory(Path(output), name)
        return Path(output) / name
    where = Path(run)
    beside = where if where.is_dir() else where.parent
    return Path(results_directory(run, name.removesuffix(".html"), str(beside))) / name


def write(sources: list[Source], page: Path, *, size: float, shift: int = 0) -> int:
    """Write a page of at most `size` megabytes of numbers, say what is on it, and give the exit code."""
    from msprobe_engine.core.io.progress import bar
    from msprobe_engine.core.log import one_line
    from msprobe_engine.report.trends.page import write_trends
    from msprobe_engine.report.trends.summary import headline, lines

    with bar("reading", sum(source.pieces() for source in sources)) as advance:
        trends = write_trends(sources, page, numbers=int(size * 250_000), shift=shift, progress=advance)
    print(one_line(headline(trends)))
    for line in lines(trends):
        print(one_line(f"  {line}"))
    print(one_line(f"Page: {page} ({page.stat().st_size / 1e6:.1f} MB)"))
    if trends.apart or any(run.nonfinite_count or run.raised.began for run in trends.runs):
        return 1
    nothing_compared = len(sources) > 1 and not trends.compared
    return 3 if nothing_compared or trends.left_alone or any(source.left_out for source in sources) else 0
