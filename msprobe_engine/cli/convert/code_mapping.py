"""Say for every tensor of a MindSpore kernel dump (static graph) which source lines its operator comes from."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EPILOG = """\
examples:
  msprobe code_mapping --ir graphs/trace_code_graph_0133 --dump_data out/rank_0/Net/0/0 --output mapped
  msprobe code_mapping --ir graphs --dump_data out                      all graphs and all iterations of a run
  msprobe -f mindspore code_mapping --ir graph.ir --dump_data out/rank_0/Net/0/0/statistic.csv

The graph is what MindSpore writes with save_graphs=2 (set_context, or MS_DEV_SAVE_GRAPHS=2). Of its files, trace_code_graph_* has
the names that a dump has; names of earlier stages differ in their numbers.

exit codes: 0 done, 2 wrong usage or input, or the graph knows nothing of the dump"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of 8.1.1, and ``--in_place`` for what it does with ``statistic.csv``."""
    add = parser.add_argument
    add("--ir", type=Path, nargs="+", required=True, metavar="PATH", help="text IR files, or directories with trace_code_graph_*")
    add("--dump_data", type=Path, required=True, metavar="PATH", help="a .npy file, a statistic.csv, or a directory above them")
    add("--output", type=Path, default=Path("./"), metavar="DIR", help="where the tables go (default: here)")
    add("--in_place", action="store_true", help="put the columns into statistic.csv itself, as 8.1.1 does")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.core.log import printable
    from msprobe_engine.report.code_mapping.mapping import map_code

    mapping = map_code(args.ir, args.dump_data, args.output, args.in_place)
    print(printable(mapping.text()))
    for note in mapping.notes:
        print(printable(f"note: {note}"), file=sys.stderr)
    return 0
