"""Convert saved tensors to .pt or .npy: .bin files of ATB, .pt, .npy, packed tensors, and kernel dumps of Ascend where CANN is installed.
Without -d: the interactive tool of version 8.1.1 (cad, vc, dc, pt, cn)."""

from __future__ import annotations

import argparse
import sys

EPILOG = """\
examples:
  msprobe parse -d atb_dump/before/intensor0.bin -t npy
  msprobe parse -d msprobe_output/dump/step0/rank0 -t npy -o arrays
  echo "cn -m a.npy -g b.npy" | msprobe -f pytorch parse

Nothing in a file is executed, and links are not followed. bfloat16 and float8 become float32 in .npy, which holds all their values.

exit codes: 0 done, 1 some files could not be read (or a command of the interactive tool failed), 2 nothing was converted or wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the existing tool 26.2.0."""
    add = parser.add_argument
    add("-d", "--dump_path", metavar="PATH", help="a file or a directory; without it: the interactive tool")
    add("-t", "--type", dest="parse_type", choices=("npy", "pt"), default="pt", help="what to write (default: pt, which needs torch)")
    add("-o", "--output_path", nargs="?", const="./output", default="./output", metavar="DIR", help="where to (default: ./output)")
    add("--msaccucmp", metavar="FILE", help="msaccucmp.py of CANN, for kernel dumps (default: that of the installed CANN)")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0: all converted; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.core.log import printable

    if args.dump_path is None:
        return _interactive()
    from msprobe_engine.core.errors import DumpFormatError
    from msprobe_engine.formats.legacy.parse.convert import convert

    result = convert(args.dump_path, args.output_path, args.parse_type, args.msaccucmp)
    for problem in result.problems[:20] if result.files else ():
        print(printable(f"warning: {problem}"), file=sys.stderr)
    if not result.files:
        raise DumpFormatError("nothing was converted" + "".join(f"\n  {problem}" for problem in result.problems[:20]))
    more = f", {len(result.problems)} could not be read" if result.problems else ""
    skipped = f", {len(result.skipped)} files hold no tensor" if result.skipped else ""
    tensors = "1 tensor" if len(result.files) == 1 else f"{len(result.files)} tensors"
    print(printable(f"{tensors} written to {args.output_path}{more}{skipped}"))
    return 1 if result.problems else 0


def _interactive() -> int:
    from msprobe_engine.formats.legacy.parse.session import Session

    session = Session(None if sys.stdin.isatty() else sys.stdin)
    if not sys.stdin.isatty():
        session.prompt = ""
    session.cmdloop()
    return 1 if session.failed else 0
