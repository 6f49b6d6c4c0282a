"""Run every API of an overflow dump again and say of each whether its overflow is normal (the result does not fit) or abnormal (it does,
the device or the way to it is at fault). Needs torch; without an accelerator the CPU is held against the CPU in float64."""

from __future__ import annotations

import argparse

from msprobe_engine.core.errors import needs_extra

EPILOG = """\
examples:
  msprobe -f pytorch run_overflow_check -api_info dump/step0/rank0/dump.json
  msprobe run_overflow_check -api_info dump/step0/rank0/dump.json -d 1 -o report

Inputs are the saved tensors of the dump (task tensor or overflow_check), otherwise drawn from the statistics. Only functions that torch
itself lists as operations on tensors are run; all others are counted.

exit codes: 0 no abnormal overflow, 1 some, 2 wrong usage or input"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the existing tool 8.1.1, and -o."""
    add = parser.add_argument
    add("-api_info", "--api_info_file", required=True, metavar="FILE", help="dump.json of one rank")
    add(
        "-j",
        "--jit_compile",
        type=str.lower,
        choices=("true", "false"),
        nargs="?",
        const="true",
        default="false",
        help="compile mode of an NPU (default: false)",
    )
    add("-d", "--device", dest="device_id", type=int, default=0, metavar="N", help="which device (default: 0)")
    add("-o", "--output_path", default="./output", metavar="DIR", help="where overflow_check_<time>.json goes (default: ./output)")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0: no abnormal overflow; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from typing import Any

    from msprobe_engine.accuracy.precheck.calls import find_dump
    from msprobe_engine.core.backend import load_backend
    from msprobe_engine.core.log import get_logger, printable
    from msprobe_engine.find.nonfinite.overflow_summary import summary
    from msprobe_engine.find.nonfinite.overflow_table import ABNORMAL, counts, table, write
    from msprobe_engine.formats.dump.read_table import read_side

    with needs_extra("torch", "torch", "running calls again"):
        backend: Any = load_backend("torch")
    file = find_dump(args.api_info_file)
    rows = backend.rerun_overflow(file, args.device_id, args.jit_compile == "true")
    log = get_logger()
    for row in rows:
        for line in row.log_lines():
            log.warning("%s", printable(line))
    print(printable(counts(rows)))
    print("\n".join(map(printable, table(rows).split("\n"))))
    if rows and rows[0].device == "cpu":
        print("There is no accelerator here: the CPU in the recorded types was held against the CPU in float64.")
    for line in summary(rows, read_side(file)):
        print(printable(line))
    print(printable(f"Details: {write(rows, args.output_path).resolve()}"))
    return 1 if any(ABNORMAL in (row.verdict, row.backward) for row in rows) else 0
