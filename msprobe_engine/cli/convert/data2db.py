"""Put what the monitor has written, or the statistics of dumps, into a trend data base (SQLite). Started again it goes on where it was
stopped and takes what has been added since."""

from __future__ import annotations

import argparse

EPILOG = """\
examples:
  msprobe data2db --db trend --data monitor_output
  msprobe data2db --db trend --data msprobe_output/dump --format dump --process_num 4
  msprobe data2db --db trend --data monitor_output --mapping names.json --micro_step false

writes DB/monitor_data.trend.db and DB/dump_data.trend.db. NaN, Inf and numbers beyond 1e9, which the tables of the existing tool cannot
hold, are in the table exact_values.

exit codes: 0 done, 2 nothing to convert, a data base is in the way (--force) or wrong usage, 3 done, but something could not be read and is
not in the data base"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the existing tool, and --force."""
    parser.add_argument("--db", required=True, metavar="DIR", help="directory of the data bases")
    parser.add_argument("--data", required=True, metavar="DIR", help="what to read: output of a monitor, or a dump")
    parser.add_argument("--format", choices=("auto", "dump", "monitor"), default="auto", help="what the data is (default: auto)")
    parser.add_argument("--mapping", metavar="FILE", help='replacements in names: a JSON file like {"old": "new"}')
    parser.add_argument(
        "--micro_step",
        type=str.lower,
        choices=("true", "false"),
        default="true",
        help="true: the axis is the running number of micro batches (default); false: the step",
    )
    parser.add_argument("--process_num", type=int, default=1, metavar="N", help="processes that read, 1 to 128 (default: 1)")
    parser.add_argument("--force", action="store_true", help="replace a data base that is there")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Convert and say what was done."""
    from msprobe_engine.core.log import printable
    from msprobe_engine.formats.monitor.convert.data2db import data2db
    from msprobe_engine.formats.monitor.convert.monitor2db import Options, read_mapping

    mapping = read_mapping(args.mapping) if args.mapping else {}
    options = Options(mapping, args.micro_step == "true", args.process_num, args.force)
    left_out = 0
    for table in data2db(args.db, args.data, args.format, options):
        left_out += table.left_out
        skipped = f", {table.skipped} were there already" if table.skipped else ""
        print(f"{table.path}: {table.rows} rows from {table.units} tables{skipped}")
        for problem, count in list(table.problems.items())[:10]:
            print(printable(f"  not read: {problem} ({count})"))
        if len(table.problems) > 10:
            print(f"  and {len(table.problems) - 10} more problems")
    return 3 if left_out else 0
