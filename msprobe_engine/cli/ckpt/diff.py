"""Compare two checkpoints, whatever their formats and parallel layouts: every byte is read once, in bounded memory. The first line of the
output is the verdict."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
examples:
  msprobe ckpt diff run golden                                 the newest checkpoints of two runs
  msprobe ckpt diff run/iter_0001000 hf/snapshot -o report     Megatron against Hugging Face; JSON, CSV and HTML
  msprobe ckpt diff run golden --rtol 1e-3 --atol 1e-6         a gate: differences within are none
  msprobe ckpt diff run golden --only-different --top 10 --json
  msprobe ckpt diff run/iter_0001000 iter_0001000.digests.json

exit codes: 0 equal, 1 different, 2 wrong usage or nothing to read, 3 cannot tell (damaged, refused, nothing in common)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two checkpoints, the gate, and where reports go."""
    parser.add_argument(
        "a",
        metavar="RUN",
        type=Path,
        help="checkpoint, directory of a run, or manifest of digests; A in the report",
    )
    parser.add_argument("b", metavar="GOLDEN", type=Path, help="one that is right; B in the report")
    parser.add_argument("-o", "--output_path", type=Path, metavar="DIR", help="write ckpt_diff.json, .csv and .html there")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write JSON; without FILE to the standard output",
    )
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write a line per tensor")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write one page")
    parser.add_argument("--only-different", "--only_different", action="store_true", help="leave equal tensors out of the files")
    parser.add_argument("--top", type=int, metavar="N", help="list only the N tensors that are furthest apart")
    parser.add_argument("--rtol", type=float, default=0.0, help="of the size of the run's element; see --atol (default: 0)")
    parser.add_argument(
        "--atol",
        type=float,
        default=0.0,
        help="a tensor whose elements are all within atol + rtol |element| is no difference (default: 0)",
    )
    parser.add_argument("--model-only", "--model_only", action="store_true", help="weights and buffers only: no optimizer, no values")
    parser.add_argument("--map", metavar="YAML", type=Path, help="names that the tool cannot know, and facts of the model")
    parser.add_argument(
        "--trust", nargs="+", action="extend", default=[], metavar="CLASS", help="take this class of a pickle as data; it is not executed"
    )
    parser.add_argument("--quick", action="store_true", help="do not read tensors that have the same CRC-32 on both sides")
    parser.add_argument("--workers", type=int, metavar="N", help="threads that read and compare (default: by the number of cores)")
    parser.add_argument("--memory_mb", "--memory-mb", type=int, default=2048, metavar="MIB", help="most memory (default: %(default)s)")
    parser.add_argument("--no-resume", "--no_resume", dest="resume", action="store_false", help="with -o: start anew")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0 equal, 1 different, 3 cannot tell; errors are raised as `ProbeError`, which the entry point turns into 2 or 3."""
    from msprobe_engine.cli.options.inputs import warn_same_files
    from msprobe_engine.cli.options.outputs import refuse_overwriting, refuse_page_name
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.core.io.output_files import write_report
    from msprobe_engine.find.checkpoint import resume
    from msprobe_engine.find.checkpoint.diff import Options, diff
    from msprobe_engine.formats.checkpoint.open import meant
    from msprobe_engine.report.checkpoint import files
    from msprobe_engine.report.checkpoint.page import page
    from msprobe_engine.report.checkpoint.text import TOP, text

    if args.top is not None and args.top < 0:
        raise UsageError(f"--top: {args.top} must not be below 0")
    refuse_page_name(args.output_path, "--html")
    outputs: list[tuple[str, str | Path | None]] = [("--json", args.json), ("--csv", args.csv), ("--html", args.html)]
    if args.output_path is not None:
        outputs += [("-o", path) for path in files.paths(args.output_path)]
    refuse_overwriting(outputs, [*meant(args.a), *meant(args.b), *([args.map] if args.map else [])])
    same = warn_same_files(args.a, args.b)
    options = Options(
        atol=args.atol, rtol=args.rtol, memory_mb=args.memory_mb, workers=args.workers, trust=args.trust, quick=args.quick,
        model_only=args.model_only, mapping=args.map, output=args.output_path, resume=args.resume,
    )  # fmt: skip
    result = diff(args.a, args.b, options)
    result.same_files = same
    shown = {"only_different": args.only_different, "top": args.top}
    # The verdict first: it is not lost when a report cannot be written.
    print(files.json_text(result, **shown).rstrip() if args.json == "-" else text(result, TOP if args.top is None else args.top))
    written = []
    if args.json not in (None, "-"):
        written.append(write_report(Path(args.json), files.json_text(result, **shown)))
    if args.csv is not None:
        written.append(write_report(Path(args.csv), files.csv_text(result, **shown)))
    if args.html is not None:
        written.append(write_report(Path(args.html), page(result, **shown)))
    if args.output_path is not None:
        written += files.write_all(result, args.output_path, **shown)
        resume.forget(args.output_path)
    for path in written if args.json != "-" else ():
        print(f"written: {path}")
    return result.code
