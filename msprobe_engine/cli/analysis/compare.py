"""Compare the dumps of two runs: a table per step and rank, and first of all where the difference begins."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msprobe_engine.cli.options.outputs import RESULTS_OF_RUN

if TYPE_CHECKING:
    from msprobe_engine.measure.options import CompareOptions

EPILOG = """\
examples:
  msprobe compare -tp out/dump/step0 -gp golden/dump/step0 -o output     all ranks; csv with the columns of 26.2.0
  msprobe compare out/dump golden/dump --html --rank 0-3                 all steps, four ranks; a page to search too
  msprobe compare -tp a/dump.json -gp b/dump.json --compat               verdicts and rows exactly as 26.2.0 has them
  msprobe -f pytorch compare -i compare.json -o output                   as 8.1.1: its json, its columns, xlsx, advice
  msprobe compare -tp out/dump -gp golden/dump --scheduler tcp://host:8786

exit codes:
  0  nothing beyond round-off (with --compat: done)
  1  differences found (with --compat never)
  2  wrong usage, no dump at a path, or the output cannot be written
  3  something could not be read or compared; the message and the summary say what"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    paths = parser.add_argument_group("what is compared")
    paths.add_argument("target", metavar="RUN", nargs="?", help="the same as -tp RUN -gp GOLDEN")
    paths.add_argument("golden", metavar="GOLDEN", nargs="?", help="the run that is right")
    paths.add_argument("-tp", "--target_path", metavar="PATH", help="the run in question, or part of its dump")
    paths.add_argument("-gp", "--golden_path", metavar="PATH", help="a run that is right, of the same kind")
    paths.add_argument("-i", "--input_path", metavar="JSON", help="as 8.1.1: a json with npu_path, bench_path, stack_path")
    paths.add_argument("--step", metavar="N,N-M", help="only these steps")
    paths.add_argument("--rank", metavar="N,N-M", help="only these ranks")
    paths.add_argument("-m", "--mode", default="auto", help="auto: dumps of a training; other modes of 26.2.0 are not here")
    out = parser.add_argument_group("what comes out")
    out.add_argument(
        "-o",
        "--output_path",
        nargs="?",
        const="./output",
        metavar="DIR",
        help=f"default: {RESULTS_OF_RUN.format('compare')}, else ./output",
    )
    out.add_argument("--csv", action="store_true", help="tables as csv (default with -tp)")
    out.add_argument("--xlsx", action="store_true", help="tables as xlsx (default with -i where xlsxwriter is installed)")
    out.add_argument("--parquet", action="store_true", help="tables as parquet")
    out.add_argument("--html", action="store_true", help="tables as pages to search")
    out.add_argument("--columns", choices=("8.1.1", "26.2.0"), help="columns of that version; default: 8.1.1 with -i, else 26.2.0")
    out.add_argument("--compat", action="store_true", help="verdicts, matching and rows exactly as that version")
    out.add_argument("--no_diagnose", action="store_true", help="tables only; do not say where the difference begins")
    out.add_argument("-da", "--diff_analyze", action="store_true", help="no tables: the first difference over all ranks, as json")
    out.add_argument("-s", "--stack_mode", action="store_true", help="8.1.1: show the stack_path of the json")
    out.add_argument("-c", "--compare_only", action="store_true", help="8.1.1: no advice file")
    out.add_argument("-tensor_log", "--is_print_compare_log", action="store_true", help="a line per saved tensor")
    match = parser.add_argument_group("which rows belong together")
    match.add_argument("--match", choices=("structure", "name"), default="structure", help="default: %(default)s")
    match.add_argument("-f", "-fm", "--fuzzy_match", action="store_true", help="names without their call numbers")
    match.add_argument("-dm", "--data_mapping", metavar="YAML", help="target row name: golden row name")
    for flag, name, what in (("-cm", "cell", "modules"), ("-am", "api", "functions"), ("-lm", "layer", "layers")):
        match.add_argument(flag, f"--{name}_mapping", nargs="?", const=True, metavar="YAML", help=f"names of {what}; alone: built-in rules")
    match.add_argument("--consistent_check", action="store_true", help="training against inference; needs --backend")
    match.add_argument("--backend", choices=("fsdp", "megatron"), help="of the training")
    measure = parser.add_argument_group("how they are measured")
    measure.add_argument(
        "--calibration",
        "--calibrate",
        metavar="DIR",
        nargs="+",
        default=[],
        help="further dumps of GOLDEN's training (msprobe run --perturb ulp): differences are counted in theirs",
    )
    measure.add_argument("--config", metavar="YAML", help="matrices that tensors are multiplied by before")
    measure.add_argument("--metrics", metavar="FILE", nargs="+", default=[], help="files with further metrics of tensors")
    run_by = parser.add_argument_group("how it is run")
    run_by.add_argument("--workers", type=int, default=0, metavar="N", help="processes; default: one per core")
    run_by.add_argument("--memory_mb", type=int, default=2048, metavar="MIB", help="for all of them together; default: %(default)s")
    run_by.add_argument("--scheduler", default="", metavar="ADDRESS", help="a running Dask cluster (tcp://host:8786)")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Exit codes: see the epilog; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.align.sources import from_json
    from msprobe_engine.cli.options.inputs import say_steps, warn_same_files
    from msprobe_engine.cli.options.outputs import refuse_page_name, results_directory

    given_run = args.target or ""
    if args.target and not (args.target_path or args.golden_path):
        args.target_path, args.golden_path, args.target = args.target, args.golden, None
    _check(args)
    refuse_page_name(args.output_path)
    given: dict[str, Any] = {}
    target, golden, stack, log = args.target_path, args.golden_path, None, args.is_print_compare_log
    if args.input_path:
        given = from_json(args.input_path)
        target, golden, stack = given["npu_path"], given["bench_path"], given["stack_path"]
        log = log or given["is_print_compare_log"]
    same = warn_same_files(target, golden)
    args.output_path = args.output_path or results_directory(given_run, "compare", "./output")
    if given.get("map_dict"):
        _rename(args, given["map_dict"], target)
    if args.diff_analyze:
        return _first_difference(target, golden, args.output_path)
    from msprobe_engine.core.log import printable
    from msprobe_engine.core.process.jobs import cluster
    from msprobe_engine.find.findings import SAME_FILES
    from msprobe_engine.report.table.api import compare_dumps

    options = _options(args, log, stack is not None, given)
    show = stack if args.stack_mode else None
    with cluster(args.scheduler):
        result = compare_dumps(
            target, golden, args.output_path, options, stack=show, scheduler=args.scheduler, diagnose=not args.no_diagnose
        )
    if same and result.diagnosis is not None:
        result.diagnosis.nothing = SAME_FILES
    print(say_steps(result.text(), result.other_steps))
    for note in result.notes:
        print(printable(f"note: {note}"), file=sys.stderr)
    return result.exit_code


def _first_difference(target: str, golden: str, output: str) -> int:
    from msprobe_engine.cli.options.inputs import say_steps
    from msprobe_engine.core.log import printable
    from msprobe_engine.find.findings import NONE
    from msprobe_engine.report.table.diff_analyze import NOTHING, first_differences

    path, result = first_differences(target, golden, output)
    if path is not None:
        print(say_steps(f"The first difference is in {path}", result.other_steps))
    elif result.finding != NONE or result.problems:  # calls or renamed modules, of which no record is the first; or not all was compared
        print(say_steps(printable(result.headline()), result.other_steps))
    else:
        print(say_steps(NOTHING, result.other_steps))
    for problem in result.problems:
        print(printable(f"warning: {problem}"), file=sys.stderr)
    if path is not None or result.finding != NONE:
        return 1
    return 3 if result.problems else 0


def _rename(args: argparse.Namespace, map_dict: dict[str, str], target: str) -> None:
    """The ``map_dict`` of 8.1.1 is a data mapping of single points."""
    from pathlib import Path

    from msprobe_engine.align.static_graph_sources import renamed_points
    from msprobe_engine.core.errors import UsageError

    if args.data_mapping:
        raise UsageError("map_dict in the json and -dm both say what belongs together; give one of them")
    args.data_mapping = renamed_points(map_dict, Path(target))


def _options(args: argparse.Namespace, log: bool, own_stack: bool, given: Mapping[str, Any]) -> CompareOptions:
    """`given`: the json of ``-i``, empty without it."""
    from pathlib import Path

    from msprobe_engine.align.sources import numbers
    from msprobe_engine.measure.options import NEW, OLD, CompareOptions
    from msprobe_engine.report.table_files import workbook_or_csv

    points = bool(given.get("common"))
    old = args.columns == OLD or (args.columns is None and bool(args.input_path))
    formats = tuple(name for name in ("csv", "xlsx", "parquet", "html") if getattr(args, name))
    return CompareOptions(
        columns=OLD if old else NEW,
        compat=args.compat,
        match=args.match,
        fuzzy=args.fuzzy_match,
        data_mapping=args.data_mapping,
        cell_mapping=args.cell_mapping,
        api_mapping=args.api_mapping,
        layer_mapping=args.layer_mapping,
        stack=args.stack_mode if own_stack else None,
        advisor=old and not args.compare_only,
        formats=formats or (workbook_or_csv() if args.input_path and not points else "csv",),
        tensor_log=log,
        ranks=numbers(args.rank, "--rank") or frozenset(given.get("rank_id", ())),
        steps=numbers(args.step, "--step") or frozenset(given.get("step_id", ())),
        memory_mb=args.memory_mb,
        workers=args.workers,
        calibration=tuple(Path(name) for name in args.calibration),
        postprocess=args.config,
        consistent_check=args.consistent_check,
        backend=args.backend,
        metrics=tuple(Path(name) for name in args.metrics),
    )


def _check(args: argparse.Namespace) -> None:
    """Flags that cannot be combined."""
    from msprobe_engine.core.errors import UsageError

    pair = bool(args.target_path) + bool(args.golden_path)
    mappings = [flag for flag in ("data", "cell", "api", "layer") if getattr(args, f"{flag}_mapping")]
    tables = args.csv or args.xlsx or args.parquet or args.html
    rules = (
        (args.target, f"{args.target}: -tp and -gp say already what is compared; leave one of them out"),
        (not args.input_path and pair < 2, "give RUN and GOLDEN (-tp and -gp), or -i with a json that has both"),
        (args.input_path and pair, "-i and -tp or -gp both say what is compared; give one of them"),
        (args.mode != "auto", f"-m {args.mode}: only auto, dumps of a training, is here; the other modes of 26.2.0 are for inference"),
        (args.fuzzy_match and args.data_mapping, "-fm and -dm: a mapping says exactly what belongs together; leave one out"),
        (len(mappings) > 1 and not args.compat, f"mappings by {' and '.join(mappings)}: only one is used; leave the others out"),
        (args.consistent_check != bool(args.backend), "--consistent_check and --backend belong together; give both or none"),
        (args.stack_mode and not args.input_path, "-s belongs to -i; with -tp stacks are shown when the dump has them"),
        (args.compare_only and not (args.input_path or args.columns == "8.1.1"), "-c belongs to 8.1.1 (-i or --columns 8.1.1)"),
        (args.diff_analyze and tables, "-da writes a json and no tables; leave the formats out"),
        (args.scheduler and args.workers, "--scheduler and --workers: the cluster has its own workers; leave one out"),
        (args.workers < 0, f"--workers {args.workers}: 0 (one per core) or more is allowed"),
        (args.memory_mb < 64, f"--memory_mb {args.memory_mb}: 64 or more is allowed"),
    )
    for wrong, sentence in rules:
        if wrong:
            raise UsageError(sentence)
