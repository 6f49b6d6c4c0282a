"""Compare the pre-checks of two devices: does the first err more than the second, which is trusted? Takes the two
accuracy_checking_details_*.csv, of the same calls; writes api_precision_compare_result_<time>.csv and ..._details_<time>.csv."""

from __future__ import annotations

import argparse

EPILOG = """\
examples:
  msprobe api_precision_compare -npu npu/accuracy_checking_details_20260101120000.csv -gpu gpu/accuracy_checking_details_20260101130000.csv
  msprobe -f pytorch api_precision_compare -npu npu.csv -gpu gpu.csv -o compared
  msprobe api_precision_compare -npu npu.csv -gpu gpu.csv --compat 8.1.1

Files of the existing tool are taken too. --compat gives its own verdicts, flaws included (a file against itself does not always pass).

exit codes: 0 all pass, 1 some do not, 2 wrong usage or input, 3 some rows could not be compared and all others pass"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the existing tool (8.1.1, 26.2.0), and --compat."""
    add = parser.add_argument
    add("-npu", "--npu_csv_path", required=True, metavar="FILE", help="details file of the pre-check on the device under test")
    add("-gpu", "--gpu_csv_path", required=True, metavar="FILE", help="details file of the same calls on the trusted device")
    add("-o", "--out_path", default="./", metavar="DIR", help="where the two files go (default: the working directory)")
    add(
        "--compat",
        nargs="?",
        const="8.1.1",
        choices=("8.1.1", "26.2.0"),
        help="rules, rows and columns of this version of the existing tool (default: 8.1.1)",
    )
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """See the exit codes; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.accuracy.precision_compare import compare_files, write
    from msprobe_engine.cli.options.inputs import warn_same_files
    from msprobe_engine.core.log import printable

    warn_same_files(args.npu_csv_path, args.gpu_csv_path)
    comparison = compare_files(args.npu_csv_path, args.gpu_csv_path, args.compat)
    result, details = write(comparison, args.out_path, args.compat)
    for line in (*comparison.text().split("\n"), f"results: {result}", f"details: {details}"):
        print(printable(line))
    return comparison.exit_code
