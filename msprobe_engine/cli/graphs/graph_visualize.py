"""Draw a dump as a graph, or two beside each other, with the flags of 26.2.0."""

from __future__ import annotations

import argparse

from msprobe_engine.cli.graphs.graph_flags import EXIT_CODES, add_shared, draw, formats_of

EPILOG = f"""\
examples:
  msprobe graph_visualize -tp out/dump -gp golden/dump -o output
  msprobe graph_visualize -tp out/dump/step0 -o output -oc
  msprobe graph_visualize -tp tp2/dump/step0 -gp tp1/dump/step0 --rank_size 2 1 --tp 2 1 --pp 1 1 -o output
  msprobe graph has the same with other words

{EXIT_CODES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of 26.2.0, then our own."""
    parser.add_argument("-tp", "--target_path", metavar="PATH", required=True, help="the run in question, or part of its dump")
    parser.add_argument("-gp", "--golden_path", metavar="PATH", help="a run that is right, of the same kind")
    parser.add_argument("-o", "--output_path", nargs="?", const="./output", default="./output", metavar="DIR", help="default: %(default)s")
    parser.add_argument("-fm", "--fuzzy_match", action="store_true", help="match calls of functions without their numbers")
    parser.add_argument("-tensor_log", "--is_print_compare_log", action="store_true", help="a line per saved tensor")
    parser.add_argument("-progress_log", "--is_print_progress_log", action="store_true", help="progress as lines, in place of a bar")
    add_shared(parser, "html and db")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Exit codes: see the epilog; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.report.graph.options import NEW

    return draw(
        args,
        args.target_path,
        args.golden_path,
        generation=NEW,
        formats=formats_of(args, ("html", "db")),
        fuzzy=args.fuzzy_match,
        tensor_log=args.is_print_compare_log,
        progress_log=args.is_print_progress_log,
    )
