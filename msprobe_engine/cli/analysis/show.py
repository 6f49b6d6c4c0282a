"""List what an output directory holds: dumped steps by rank with their tensor files (and marks of what is incomplete or was not
saved), incidents, what the monitor wrote (ranks, steps, families, alerts), other tables, reports, graphs, event files, configuration
packs and their sizes, and directories of further runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

EPILOG = """\
examples:
  msprobe show runs/a
  msprobe show runs/a --json
  msprobe show runs/a --why Functional.softmax.0.backward     why is it not in my dump?

exit codes: 0 done, 2 no such directory, or nothing in it that msprobe writes, 3 done, and the run says that it has lost something.
With --why: 0 it is in all steps and ranks, 1 it is missing and the dump says why, 3 it is missing and the dump does not say why, or not all
of it could be read"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``msprobe show``."""
    parser.add_argument("path", type=Path, help="output directory of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--why", metavar="NAME", help="say why a module or a call is not in the dump")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Print the listing, and what the run has lost; or the answer to --why."""
    if args.why is not None:
        from msprobe_engine.find.missing_record import explain_absence

        answer = explain_absence(args.path, args.why)
        print(json.dumps(answer.to_json(), indent=2) if args.json else "\n".join(answer.lines()))
        return answer.exit_code
    from msprobe_engine.core.log import printable
    from msprobe_engine.formats.run.overview import read_overview

    overview = read_overview(args.path)
    print(json.dumps(overview.to_json(), indent=2) if args.json else overview.text())
    for sentence in overview.lost:
        print(printable(f"warning: {sentence}"), file=sys.stderr)
    return 3 if overview.lost else 0
