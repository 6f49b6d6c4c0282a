"""What both commands for graphs have in common: flags, options made of them, and what is said at the end."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_engine.report.graph.options import Layout
    from msprobe_engine.report.graph.summary import Result

EXIT_CODES = """\
exit codes:
  0  nothing beyond round-off; of one run: no NaN or Inf that matters
  1  something was found
  2  wrong usage, no dump at a path, nothing in it, or the output cannot be written
  3  something could not be read or compared; the message says what"""

FORMATS = ("html", "vis", "db", "model_explorer")


def add_shared(parser: argparse.ArgumentParser, formats: str) -> None:
    """Flags of ours that both commands have; `formats`: the default, as a text."""
    parser.add_argument("-oc", "--overflow_check", action="store_true", help="mark where NaN, Inf or a jump of the norm is made")
    parser.add_argument(
        "-lm",
        "--layer_mapping",
        nargs="?",
        const=True,
        metavar="YAML",
        help="names of layers; alone: match by names, whatever the shapes",
    )
    group = parser.add_argument_group("what comes out and what goes in")
    group.add_argument("--format", metavar="NAME,NAME", help=f"among {', '.join(FORMATS)}; default: {formats}")
    group.add_argument("--step", metavar="N,N-M", help="only these steps")
    group.add_argument("--rank", metavar="N,N-M", help="only these ranks")
    group.add_argument(
        "--match",
        choices=("structure", "exact"),
        default="structure",
        help="exact: nodes that the existing tool leaves without a partner are left; default: %(default)s",
    )
    group.add_argument("--open", action="store_true", help="show the page in a browser")
    group.add_argument("--workers", type=int, default=0, metavar="N", help="processes; default: one per core")
    group.add_argument("--memory_mb", type=int, default=2048, metavar="MIB", help="for all of them together; default: %(default)s")
    group.add_argument("--scheduler", default="", metavar="ADDRESS", help="a running Dask cluster (tcp://host:8786)")
    merge = parser.add_argument_group("ranks of a parallel job in one graph")
    merge.add_argument("--merge", choices=("auto",), help="auto: the dumps themselves say how the job was cut")
    merge.add_argument("--rank_size", type=int, nargs="+", metavar="N", help="number of ranks; with two runs two numbers")
    merge.add_argument("--tp", type=int, nargs="+", metavar="N", help="size of tensor parallel groups")
    merge.add_argument("--pp", type=int, nargs="+", metavar="N", help="pipeline stages")
    merge.add_argument("--vpp", type=int, nargs="+", metavar="N", help="parts of a stage; default: 1")
    merge.add_argument("--order", nargs="+", metavar="TEXT", help="of the groups; default: tp-cp-ep-dp-pp")
    merge.add_argument("--file_type", choices=("db", "json"), default="db", help="json: write the merged dump itself, of one run")
    parser.epilog = EXIT_CODES


def formats_of(args: argparse.Namespace, default: tuple[str, ...]) -> tuple[str, ...]:
    """What ``--format`` says.

    Raises:
        UsageError: it names something else.
    """
    from msprobe_engine.core.errors import UsageError

    if args.format is None:
        return default
    formats = tuple(name for name in args.format.replace(" ", "").split(",") if name)
    wrong = [name for name in formats if name not in FORMATS]
    if wrong or not formats:
        raise UsageError(f"--format {args.format!r}: allowed are {', '.join(FORMATS)}, several with commas between them")
    return formats


def layouts(args: argparse.Namespace, sides: int) -> tuple[Layout, ...]:
    """What ``--rank_size --tp --pp --vpp --order`` say of each side; empty without them.

    Raises:
        UsageError: they do not fit each other.
    """
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.report.graph.options import Layout

    given = {name: getattr(args, name) for name in ("rank_size", "tp", "pp", "vpp", "order")}
    if not any(given.values()):
        return ()
    if args.merge:
        raise UsageError("--merge auto takes the layout from the dumps; leave --rank_size, --tp, --pp, --vpp and --order out")
    for name in ("rank_size", "tp", "pp"):
        if not given[name]:
            raise UsageError(f"--{name} is missing: --rank_size, --tp and --pp belong together")
    for name, values in given.items():
        if values and len(values) != sides:
            what = "one run: one value" if sides == 1 else "two runs: two values, that of the target first"
            raise UsageError(f"--{name} {' '.join(map(str, values))}: {what}")
        if name != "order" and any(value < 1 for value in values or ()):
            raise UsageError(f"--{name} {' '.join(map(str, values))}: 1 or more is allowed")
    orders = given["order"] or ["tp-cp-ep-dp-pp"] * sides
    columns = zip(given["rank_size"], given["tp"], given["pp"], given["vpp"] or [1] * sides, orders)
    return tuple(Layout(*values) for values in columns)


def draw(args: argparse.Namespace, target: str, golden: str | None, **settings: Any) -> int:
    """Make the graphs, print what they came to, and return the exit code; `settings`: further fields of the options."""
    from msprobe_engine.align.sources import numbers
    from msprobe_engine.cli.options.inputs import warn_same_files
    from msprobe_engine.cli.options.outputs import refuse_page_name
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.core.process.jobs import cluster
    from msprobe_engine.report.graph.options import GraphOptions
    from msprobe_engine.report.graph.run import run

    refuse_page_name(args.output_path)
    warn_same_files(target, golden)
    if args.workers < 0 or args.memory_mb < 64:
        raise UsageError(
            f"--workers {args.workers} and --memory_mb {args.memory_mb}: 0 (one per core) or more, and 64 or more, are allowed"
        )
    if args.scheduler and args.workers:
        raise UsageError("--scheduler and --workers: the cluster has its own workers; leave one out")
    cut = layouts(args, 2 if golden else 1)
    options = GraphOptions(
        match=args.match,
        layer_mapping=args.layer_mapping,
        overflow=args.overflow_check,
        ranks=numbers(args.rank, "--rank"),
        steps=numbers(args.step, "--step"),
        merge="given" if cut else args.merge or "",
        layouts=cut,
        file_type=args.file_type,
        memory_mb=args.memory_mb,
        workers=args.workers,
        scheduler=args.scheduler,
        **settings,
    )
    if args.file_type == "json" and (golden or not options.merge):
        raise UsageError("--file_type json writes the merged dump of one run; give one path, and --merge auto or --rank_size")
    with cluster(args.scheduler):
        result = run(target, golden, args.output_path, options, _print_progress if options.progress_log else None)
    _print_result(result, args.open)
    return result.exit_code


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_result(result: Result, show: bool) -> None:
    from msprobe_engine.cli.options.inputs import say_steps
    from msprobe_engine.core.log import printable

    print(printable(say_steps(result.text(), result.other_steps)))
    for note in result.notes:
        print(printable(f"note: {note}"), file=sys.stderr)
    pages = [path for path in result.files if path.suffix == ".html"]
    if show and pages:
        import webbrowser

        webbrowser.open(Path(pages[0]).resolve().as_uri())
