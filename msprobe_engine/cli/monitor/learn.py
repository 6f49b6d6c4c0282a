"""Learn what is normal from healthy runs: a band per metric and the relations that hold. Rule `learned` holds later runs against them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EPILOG = """\
examples:
  msprobe monitor learn runs/good -o bands.json
  msprobe monitor learn runs/good runs/good2 -o bands.json --check runs/good3

then, in probe.yaml of a later run:
  rules:
    - {rule: learned, args: {file: bands.json}}

exit codes: 0 done, 1 done and --check found false alarms, 2 wrong usage or input, 3 done, but something of the runs is missing or could
not be read"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``msprobe monitor learn``."""
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="output of a healthy run: CSV, JSON lines or SQLite")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="where the bands are written (bands.json)")
    add("--check", type=Path, action="append", default=[], metavar="RUN", help="another healthy run: false alarms are counted")
    add("--patience", type=int, default=3, metavar="N", help="steps in a row outside of its band before a metric counts (default: 3)")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0: done, 1: false alarms in a run that was checked, 3: something of the runs is missing or could not be read."""
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.core.io.progress import progress
    from msprobe_engine.probe.learn.bands_of_runs import alerts_of, check, describe, learn
    from msprobe_engine.probe.rules.bands import save_bands

    if args.patience < 1:
        raise UsageError(f"--patience {args.patience}: expected 1 or more")
    if not args.output.parent.is_dir():
        raise UsageError(f"{args.output}: the directory {args.output.parent} is not there; make it or name another place")
    for path in args.runs:
        if count := alerts_of(path):
            what = f"{count} alert{'s' if count > 1 else ''} in this run"
            print(f"{path}: {what}: is it healthy? Bands learned from a fault let the next one pass", file=sys.stderr)
    learned = learn(args.runs, patience=args.patience, progress=lambda items: progress(items, "learning"))
    save_bands(learned.bands, args.output)
    print("\n".join(describe(learned)))
    for problem, times in list(learned.unread.items())[:10]:
        print(f"  not read: {problem} ({times})")
    if len(learned.unread) > 10:
        print(f"  and {len(learned.unread) - 10} more problems")
    for sentence in learned.missing:
        print(f"warning: {sentence}", file=sys.stderr)
    count = 0
    for path in args.check:
        alarms, known = check(learned.bands, path, progress=lambda items: progress(items, "checking"))
        false_alarms = sum(len(alarm.steps) for alarm in alarms)
        count += false_alarms
        print(f"{path}: {false_alarms} false alarms in {len(alarms)} of {known} metrics")
        for alarm in alarms[:10]:
            print(f"  {alarm.metric}: steps {', '.join(map(str, alarm.steps[:5]))}{', ...' if len(alarm.steps) > 5 else ''}")
        if len(alarms) > 10:
            print(f"  and {len(alarms) - 10} more metrics; learn from this run, too, to widen their bands")
    print(f"written: {args.output}")
    return 1 if count else 3 if learned.unread_count or learned.missing else 0
