"""Say what is wrong with a run, in one page: where two runs part, where the first NaN or Inf was born, which collective or rank is off.
The first line of the output is the finding."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.output_files import guard_writing

EPILOG = """\
examples:
  msprobe diagnose out/dump                        one run: first NaN or Inf, collectives that are off
  msprobe diagnose out/dump golden/dump            two runs: the first record whose output is off while its inputs are not
  msprobe diagnose out/dump/step3 golden/dump/step3 -o report
  msprobe diagnose out/dump golden/dump --calibrate moved/dump
  msprobe diagnose out/dump golden/dump --exact    must be the same to the last bit

exit codes: 0 nothing found, 1 found, 2 no data or wrong usage, 3 nothing found, but something could not be read"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One or two runs, and where the page goes."""
    parser.add_argument("target", metavar="RUN", help="output directory, dump, step, rank, incident, or monitor output")
    parser.add_argument("golden", metavar="GOLDEN", nargs="?", help="a run that is right, of the same kind")
    parser.add_argument(
        "-o",
        "--output_path",
        metavar="DIR",
        help="where diagnosis.html and diagnosis.json go (default: RUN/analysis/diagnose-N, else ./msprobe_diagnosis)",
    )
    parser.add_argument(
        "--calibration",
        "--calibrate",
        nargs="+",
        default=(),
        metavar="DIR",
        help="further dumps of GOLDEN's training (msprobe run --perturb ulp): differences are counted in theirs",
    )
    parser.add_argument("--exact", action="store_true", help="round-off is a finding, too")
    for flag, name, what in (("-cm", "cell", "modules"), ("-am", "api", "functions"), ("-lm", "layer", "layers"), ("-dm", "data", "rows")):
        option: dict[str, Any] = {} if name == "data" else {"nargs": "?", "const": True}
        parser.add_argument(flag, f"--{name}_mapping", metavar="YAML", help=f"names of {what}, as msprobe compare takes them", **option)
    parser.add_argument("--scheduler", default="", metavar="ADDRESS", help="a running Dask cluster (tcp://host:8786)")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0 nothing found, 1 found, 3 nothing found in what could be read; errors are raised as `ProbeError`, which the entry point turns
    into 2."""
    from msprobe_engine.align.mapping.user_mapping import Mappings
    from msprobe_engine.cli.options.inputs import say_steps, warn_same_files
    from msprobe_engine.cli.options.outputs import refuse_page_name, results_directory
    from msprobe_engine.core.log import printable
    from msprobe_engine.core.process.jobs import cluster
    from msprobe_engine.find.coverage import renames, two_frameworks
    from msprobe_engine.find.findings import NONE, SAME_FILES
    from msprobe_engine.find.run import diagnose
    from msprobe_engine.report.diagnosis import layout_plan
    from msprobe_engine.report.diagnosis.page import write

    refuse_page_name(args.output_path)
    same = warn_same_files(args.target, args.golden)
    mappings = Mappings(args.data_mapping, args.cell_mapping, args.api_mapping, args.layer_mapping)
    with cluster(args.scheduler):
        result = diagnose(
            args.target, args.golden, calibration=args.calibration, mappings=mappings, exact=args.exact, scheduler=args.scheduler
        )
    if same and result.finding == NONE:
        result.nothing, result.evidence = SAME_FILES, []
    print(say_steps(result.text(), result.other_steps))
    args.output_path = args.output_path or results_directory(args.target, "diagnose", "./msprobe_diagnosis")
    with guard_writing(args.output_path, "name another directory with -o"):
        args.answer_file, page = write(result, args.output_path)
        plan = layout_plan.write(result, Path(args.output_path) / layout_plan.FILE)
        names = renames.write(result, Path(args.output_path) / renames.FILE)
        functions = two_frameworks.write(result, Path(args.output_path) / two_frameworks.FILE)
    print(f"Page: {page}")
    if plan is not None:
        print(printable(f"Layout: {plan}; how each tensor was put together from the pieces of the ranks"))
    if names is not None:
        print(printable(f"Mapping: {names}; with -cm {names} these names are no difference (msprobe diagnose and compare take it)"))
    if functions is not None:
        print(printable(f"Mapping: {functions}; functions that are likely to be the same; look it through and give it back with -am"))
    if result.finding != NONE:
        return 1
    return 3 if result.problems else 0
