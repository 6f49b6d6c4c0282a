"""Convert the monitor files of a run into TensorBoard event files, one directory per rank and family."""

from __future__ import annotations

import argparse
import sys

EPILOG = """\
examples:
  msprobe monitor csv2tb monitor_output
  msprobe monitor csv2tb monitor_output --time_start Dec03_21-34-40 --time_end Jan02_08-00-00 --process_num 4
  msprobe monitor csv2tb monitor_output --data_type_list grad_reduced,param_updated -o curves

exit codes: 0 done, 2 nothing to convert or wrong usage, 3 rows, records or files were left out, see the messages"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `csv2tensorboard_by_step`."""
    parser.add_argument("monitor_path", metavar="DIR", help="directory that holds the directories of the ranks")
    parser.add_argument("--time_start", metavar="STAMP", help="only directories from this time stamp on, like Dec03_21-34-40")
    parser.add_argument("--time_end", metavar="STAMP", help="only directories up to this time stamp")
    parser.add_argument("--process_num", type=int, default=1, metavar="N", help="processes that convert, 1 to 128 (default: 1)")
    parser.add_argument("--data_type_list", metavar="FAMILIES", help="families, with commas between them (default: all)")
    parser.add_argument("-o", "--output_dirpath", metavar="DIR", help="default: DIR/{stamp}-csv2tensorboard_by_step")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Convert and print where the result is."""
    from msprobe_engine.formats.monitor.convert.csv2tb import convert

    families = [f.strip() for f in args.data_type_list.split(",")] if args.data_type_list else None
    done = convert(args.monitor_path, args.time_start, args.time_end, args.process_num, families, args.output_dirpath)
    print(done.path)
    if not done.left_out:
        return 0
    print(f"msprobe monitor csv2tb: {done.left_out:,} rows, records or files could not be read and are not in the result", file=sys.stderr)
    return 3
