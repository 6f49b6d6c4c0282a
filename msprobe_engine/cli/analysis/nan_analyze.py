"""Find the operator or module where the first NaN or Inf was born: its output holds one, its inputs do not. Reads the dumps of all
ranks; collectives and pipeline sends order the ranks. Of the output directory of a run also its incidents and what its monitor has seen."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EPILOG = """\
examples:
  msprobe nan_analyze msprobe_output/latest                dump, incidents and monitor of a run
  msprobe nan_analyze -i msprobe_output/dump               every step in order, stops at the first bad one
  msprobe nan_analyze -i msprobe_output/dump/step12 -o out
  msprobe nan_analyze -i msprobe_output/incidents/step12-nan_inf

exit codes: 0 nothing found, 1 found, 2 no data or wrong usage, 3 nothing found, but something could not be read"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and the flags of the existing tool: -i, -o."""
    parser.add_argument("run_path", metavar="RUN", nargs="?", help="output directory, dump, step, or incident")
    parser.add_argument("-i", "--input_path", metavar="DIR", help="the same, as the existing tool has it")
    parser.add_argument(
        "-o",
        "--output_path",
        metavar="DIR",
        help="where anomaly_analyze_<time>.json goes (default: RUN/analysis/nan_analyze-N, else ./output)",
    )
    parser.add_argument("--scheduler", default="", metavar="ADDRESS", help="a running Dask cluster (tcp://host:8786)")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0 nothing found, 1 found, 3 nothing found in what could be read; errors are raised as `ProbeError`, which the entry point turns
    into 2."""
    from msprobe_engine.cli.options.outputs import results_directory
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.core.log import printable
    from msprobe_engine.core.process.jobs import cluster
    from msprobe_engine.find.findings import NOTHING, Diagnosis
    from msprobe_engine.find.nonfinite.report import write_json
    from msprobe_engine.find.nonfinite.whole_run import nan_analyze_run

    if bool(args.run_path) == bool(args.input_path):
        raise UsageError(
            f"-i {args.input_path} and {args.run_path} both say what is looked at; give one of them"
            if args.run_path
            else "give RUN: the output directory of a run, a dump, a step, or an incident directory"
        )
    with cluster(args.scheduler):
        result = nan_analyze_run(args.run_path or args.input_path, args.scheduler)
    if result.problems and not result.findings:
        print(Diagnosis(nothing=NOTHING, problems=result.problems).headline())
    print(printable(result.text))
    for problem in result.problems:
        print(printable(f"warning: {problem}"), file=sys.stderr)
    if result.findings:
        directory = args.output_path or results_directory(args.run_path or args.input_path, "nan_analyze", "./output")
        path = args.answer_file = write_json(result.findings, Path(directory))
        print(printable(f"Details: {path.resolve()}"))
    if result.findings:
        return 1
    return 3 if result.problems else 0
