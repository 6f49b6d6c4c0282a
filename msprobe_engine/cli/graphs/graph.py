"""Draw a dump as a graph, or two beside each other: one page that opens anywhere, and the files of the existing tool."""

from __future__ import annotations

import argparse
from typing import Any

from msprobe_engine.cli.graphs.graph_flags import EXIT_CODES, add_shared, draw, formats_of
from msprobe_engine.cli.options.outputs import RESULTS_OF_RUN

EPILOG = f"""\
examples:
  msprobe graph out/dump golden/dump -o output                 two runs: graph_*.html opens at the first suspect
  msprobe graph out/dump/step3 -oc                             one run: the first NaN or Inf, and every overflow marked
  msprobe graph tp2/dump tp1/dump --merge auto                 ranks of a parallel job put together first
  msprobe -f pytorch graph -i compare.json -o output           as 8.1.1: its json; writes .vis as well

{EXIT_CODES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of 8.1.1, then our own."""
    parser.add_argument("target", metavar="RUN", nargs="?", help="output directory, dump, step, rank, or dump.json")
    parser.add_argument("golden", metavar="GOLDEN", nargs="?", help="a run that is right, of the same kind")
    parser.add_argument("-i", "--input_path", metavar="JSON", help="as 8.1.1: a json with npu_path and, to compare, bench_path")
    parser.add_argument(
        "-o", "--output_path", nargs="?", const="./output", metavar="DIR", help=f"default: {RESULTS_OF_RUN.format('graph')}, else ./output"
    )
    parser.add_argument("-f", "-fm", "--fuzzy_match", action="store_true", help="match calls of functions without their numbers")
    parser.add_argument("-cs", "--complete_stack", action="store_true", help="whole call stacks in .vis; default: one line each")
    parser.add_argument("--rules", choices=("8.1.1", "26.2.0"), help="of matching and precision index; default: 8.1.1 with -i, else 26.2.0")
    add_shared(parser, "html (with -i: html and vis)")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Exit codes: see the epilog; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.cli.options.outputs import results_directory
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.report.graph.options import NEW, OLD

    target, golden, log = args.target, args.golden, False
    if args.input_path and target:
        raise UsageError(f"-i and {target} both say what is drawn; give one of them")
    if args.input_path:
        given = from_json(args.input_path)
        target, golden, log = given["npu_path"], given["bench_path"], given["is_print_compare_log"]
    if not target:
        raise UsageError("give RUN, or RUN and GOLDEN, or -i with a json that has npu_path")
    args.output_path = args.output_path or results_directory(args.target or "", "graph", "./output")
    old = args.rules == OLD or (args.rules is None and bool(args.input_path))
    return draw(
        args,
        target,
        golden or None,
        generation=OLD if old else NEW,
        formats=formats_of(args, ("html", "vis") if args.input_path else ("html",)),
        fuzzy=args.fuzzy_match,
        complete_stack=args.complete_stack,
        tensor_log=log,
    )


def from_json(path: str) -> dict[str, Any]:
    """Read the json of version 8.1.1: ``npu_path``, ``bench_path`` (None: one run alone), ``is_print_compare_log``.

    Raises:
        DumpFormatError: it is not there or no JSON.
        UsageError: a key is missing or of the wrong type.
    """
    from pathlib import Path

    from msprobe_engine.core.errors import DumpFormatError, UsageError
    from msprobe_engine.formats.dump.rank_files import parse_json, read_bytes

    try:
        document = parse_json(read_bytes(Path(path)), Path(path))
    except FileNotFoundError:
        raise DumpFormatError(f"{path}: there is no such file; give the json with npu_path and, to compare, bench_path") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: holds a {type(document).__name__}; a JSON object with npu_path is needed")
    target, golden = document.get("npu_path"), document.get("bench_path") or None
    log = document.get("is_print_compare_log", True)
    if not isinstance(target, str) or not target:
        raise UsageError(f"{path}: key 'npu_path' is {target!r}; a path is needed")
    if not isinstance(golden, str | None) or not isinstance(log, bool):
        raise UsageError(
            f"{path}: bench_path is {golden!r} and is_print_compare_log {log!r}; a path or null, and true or false, are allowed"
        )
    return {"npu_path": target, "bench_path": golden, "is_print_compare_log": log}
