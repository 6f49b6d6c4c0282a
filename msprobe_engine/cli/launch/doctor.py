"""Say what is here: frameworks, what the probe will see of them, conflicts, limits, the command to try next. Then check on this machine
that the probe's numbers are right, that it leaves a training as it is, and what it costs.

Takes at most ten minutes on one GPU or NPU; a reduced set runs on a CPU. Needs torch, numpy and PyYAML, and runs from a source tree, too:
python -m msprobe_integrations.doctor
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

from msprobe_engine.core.io.output_files import write_named

CHECKS = "msprobe_integrations.doctor.checks"
"""Module with the table of checks; it imports no framework."""
RUNNER = "msprobe_integrations.doctor"
"""What runs one check; started, not imported."""
EPILOG = """\
examples:
  msprobe doctor --brief                  what is here, in a moment; nothing is run
  msprobe doctor
  msprobe doctor --only A,B2 --json doctor.json
  msprobe doctor --budget 180 --markdown doctor.md
  msprobe doctor --list

Each line is: verdict, check, what was checked, figure, goal. ok: as it should be. WRONG: numbers or bits that are not right, or a
check that died. slow: right, but dearer than the goal. skipped: not checked, and why.

exit codes: 0 nothing is wrong (something may be slow, or skipped because this machine has not what it needs: the last lines say so),
1 something is WRONG, 2 wrong usage, or nothing could be checked, 3 nothing is wrong, but time was too short for a check (--budget)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"), help="type of the device; default: the first of these that is there")
    parser.add_argument("--budget", type=float, default=600.0, metavar="SECONDS", help="time for all checks together (default: 600)")
    parser.add_argument("--only", action="append", default=[], metavar="KEYS", help="only these checks: A1,B2; A stands for A1, A2, ...")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path("-"),
        metavar="FILE",
        help="write JSON; without FILE to the standard output",
    )
    parser.add_argument("--brief", action="store_true", help="only say what is here: run no check")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a table for docs/evidence/hardware.md")
    parser.add_argument(
        "--peer", default="", metavar="DIRECTORY", help="where the existing tool was installed, to be timed beside the probe"
    )
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Say what is here, run the checks and print their lines."""
    from msprobe_engine import __version__
    from msprobe_engine.cli.options.outputs import refuse_overwriting
    from msprobe_engine.workflow.doctor import execute
    from msprobe_engine.workflow.greeting import greet

    refuse_overwriting([("--json", args.json)], ())
    to_stdout = args.json == Path("-")
    greeting = greet(__version__)
    if args.brief:
        answer = json.dumps(greeting.to_json(), indent=2)
        print(answer if to_stdout else "\n".join(greeting.lines()))
        if args.json and not to_stdout:
            write_named(args.json, [f"{answer}\n".encode()])
        return 0
    if not args.list:
        print("\n".join((*greeting.lines(), "")), flush=True, file=sys.stderr if to_stdout else sys.stdout)
    if not to_stdout:
        return execute(args, CHECKS, RUNNER)
    with tempfile.TemporaryDirectory() as directory:
        args.json = Path(directory) / "doctor.json"
        with contextlib.redirect_stdout(sys.stderr):
            code = execute(args, CHECKS, RUNNER)
        sys.stdout.write(args.json.read_text(encoding="utf-8") if args.json.exists() else "")
        args.json = Path("-")
    return code
