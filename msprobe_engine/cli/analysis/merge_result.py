"""Put chosen rows of the tables of many ranks into one xlsx: a sheet per metric, a column per rank."""

from __future__ import annotations

import argparse

EPILOG = """\
examples:
  msprobe merge_result -i output -o merged -config merge.yaml

merge.yaml:
  api: [Distributed.all_reduce, Distributed.all_gather_into_tensor.3]
  compare_index: [Max diff, L2norm diff]         optional; default: all metrics

exit codes: 0 done, 2 wrong usage, or nothing to merge, 3 merged, but tables were left out or had been cut off"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the existing tool."""
    parser.add_argument("-i", "--input_dir", required=True, metavar="DIR", help="directory of the tables of compare")
    parser.add_argument("-o", "--output_dir", required=True, metavar="DIR", help="where the file goes")
    parser.add_argument("-config", "--config-path", dest="config_path", required=True, metavar="YAML", help="calls and metrics to take")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Exit codes: see the epilog; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.report.table.merge_result import merge_result

    merged = merge_result(args.input_dir, args.output_dir, args.config_path)
    print(f"{merged.rows:,} rows of ranks {', '.join(map(str, merged.ranks))}: {merged.path}")
    for note in merged.notes:
        print(f"  note  {note}")
    return 3 if merged.lost else 0
