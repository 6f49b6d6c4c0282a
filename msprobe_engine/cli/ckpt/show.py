"""List what a checkpoint holds: its format and layout, tensors with their sizes, and plain values. No tensor is read."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
examples:
  msprobe ckpt show run_a
  msprobe ckpt show run_a/iter_0001000 --tensors --values
  msprobe ckpt show run_a --json

exit codes: 0 done, 2 no such checkpoint, damaged or refused"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A checkpoint, and how much of it is shown."""
    parser.add_argument("path", metavar="PATH", type=Path, help="checkpoint, or directory of a run")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--values", action="store_true", help="list every plain value")
    parser.add_argument("--json", action="store_true", help="print all as JSON")
    parser.add_argument("--trust", nargs="+", action="extend", default=[], metavar="CLASS", help="as msprobe ckpt diff has it")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Print the listing; 2 when the checkpoint is damaged."""
    import json

    from msprobe_engine.find.checkpoint.diff import OpenedCheckpoint, Options
    from msprobe_engine.report.checkpoint.show import describe_checkpoint, text

    checkpoint = OpenedCheckpoint(args.path, Options(trust=args.trust)).checkpoint
    if args.json:
        print(json.dumps(describe_checkpoint(checkpoint), indent=1, allow_nan=False))
    else:
        print(text(checkpoint, tensors=args.tensors, values=args.values))
    return 2 if checkpoint.problems else 0
