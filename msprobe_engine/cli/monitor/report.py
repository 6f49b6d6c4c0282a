"""Write one HTML page of a monitored run that needs no network: curves and heat maps per family, alerts on the time line, the layers
that stand out."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
examples:
  msprobe monitor report runs/a                     writes runs/a/report.html
  msprobe monitor report runs/a/monitor -o a.html
  msprobe monitor report runs/a --since Nov21_09-00-00

exit codes: 0 done, and nothing is wrong on the page; 1 the page shows alerts or numbers that are not finite; 2 no data or wrong usage;
3 nothing of that, but something is missing or could not be read and is not on the page"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the page, and a range of time."""
    parser.add_argument("run_path", metavar="RUN", help="output directory of a monitored run, or what is in it")
    parser.add_argument("-o", "--output", default="", metavar="FILE", help="the page (default: RUN/report.html)")
    parser.add_argument("--since", metavar="STAMP", help="only directories from this time stamp on (MonDD_HH-MM-SS)")
    parser.add_argument("--until", metavar="STAMP", help="only directories up to this time stamp")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """The exit code, see `EPILOG`; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.core.io.progress import bar
    from msprobe_engine.core.log import printable
    from msprobe_engine.formats.monitor.reader import open_run
    from msprobe_engine.report.run.data import shows_trouble
    from msprobe_engine.report.run.page import write_report

    opened = open_run(args.run_path, since=args.since, until=args.until)
    where = Path(args.run_path)
    page = Path(args.output) if args.output else (where if where.is_dir() else where.parent) / "report.html"
    total = sum(len(opened.families(rank)) for rank in opened.ranks)
    with bar("reading", total) as advance:
        data = write_report(opened, page, advance)
    print(
        f"{page}: {_count(len(data['ranks']), 'rank')}, steps {data['first']} to {data['last']}, {_count(len(data['pictures']), 'picture')}"
    )
    for rule, count in sorted(data["rules"].items()):
        print(printable(f"  {_count(count, 'alert')} of rule {rule}"))
    for w in data["worst"][:5]:
        bad = (
            f"NaN or Inf at step {w['first_bad']}"
            if w["first_bad"] is not None
            else f"{'1/' if w['below'] else ''}{w['jump']:g}{' of' if w['below'] else ' times'} its median at step {w['jump_step']}"
        )
        print(printable(f"  {w['layer']} ({w['family']}): {bad}"))
    for what in data["running"]:
        print(printable(f"  note: {what}"))
    for what in data["missing"]:
        print(printable(f"  missing: {what}"))
    for what, count in data["problems"].items():
        print(printable(f"  not read: {what} ({count})"))
    if shows_trouble(data):
        return 1
    return 3 if opened.left_out or data["missing"] else 0


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
