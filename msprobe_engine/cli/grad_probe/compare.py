"""Compare the gradient directions of two runs of the gradient probe, step by step: share of elements whose gradient has the same
sign. Suspect are a parameter whose similarity is below 0.97 in its first step, or falls by more than 0.03 from one step to the next."""

from __future__ import annotations

import argparse
import sys

MOST = 20
"""Suspects that are printed."""

EPILOG = """\
examples:
  msprobe grad_probe compare run/grad golden/grad -o out               all ranks both have
  msprobe grad_probe compare run/grad/rank0 golden/grad/rank0 -o out   one rank
  msprobe grad_probe compare run/grad golden/grad -o out --no-plots    numbers only

exit codes: 0 nothing is suspect, 1 something is, 2 no data or wrong usage, 3 nothing is suspect in what could be compared"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two directories and where the result goes."""
    parser.add_argument("first", metavar="RUN", help="dump_path of a run of task grad_probe, or one rank{R} directory in it")
    parser.add_argument("second", metavar="GOLDEN", help="the same of a run that is right")
    parser.add_argument(
        "-o", "--output_path", default="./output", metavar="DIR", help="where rank{R}/similarities.csv goes (default: ./output)"
    )
    parser.add_argument("--no-plots", action="store_true", help="write no pictures")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0 nothing is suspect, 1 something is, 3 not everything could be compared; errors are raised as `ProbeError`, which the entry point
    turns into 2."""
    from pathlib import Path

    from msprobe_engine.cli.options.inputs import warn_same_files
    from msprobe_engine.core.io.progress import progress
    from msprobe_engine.core.log import printable
    from msprobe_engine.formats.grad_probe.compare import compare_one, compare_runs, is_rank_directory

    target, golden, output, plots = Path(args.first), Path(args.second), Path(args.output_path), not args.no_plots
    warn_same_files(target, golden)
    of_one_rank = is_rank_directory(target) and is_rank_directory(golden)
    result = (compare_one if of_one_rank else compare_runs)(target, golden, output, plots=plots, progress=progress)
    suspects = result.suspects
    if suspects:
        step = min(s.step for s in suspects)
        names = list(dict.fromkeys(s.parameter for s in suspects if s.step == step))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(printable(f"First difference: step {step}, gradient of {names[0]}{more}"))
    else:
        print("No gradient is suspect")
    for suspect in suspects[:MOST]:
        where = f"step {suspect.step}" if suspect.rank is None else f"rank {suspect.rank} step {suspect.step}"
        print(printable(f"{where}: {suspect.parameter}: similarity {suspect.similarity:.4f}, {suspect.why}"))
    if len(suspects) > MOST:
        print(f"... and {len(suspects) - MOST} more in suspects.csv")
    print(f"Details: {output}")
    print(f"Compared: ranks {result.ranks}, steps {result.steps}, parameters {result.parameters}")
    for line in result.notes:
        print(printable(f"note: {line}"), file=sys.stderr)
    for line in result.problems:
        print(printable(f"warning: {line}"), file=sys.stderr)
    if suspects:
        return 1
    return 3 if result.problems else 0
