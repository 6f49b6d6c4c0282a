"""Compare what two runs were started with, before their numbers are: environment, packages, settings, first weights, samples, random
calls. The first line of the output is the verdict; the exit code is a gate for launch scripts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msprobe_engine.find.config.between_ranks import Ranks
    from msprobe_engine.find.config.comparison import Comparison
    from msprobe_engine.find.config.log_files import LogComparison

PACK, RESULT, CHECKPOINT = "./config_check_pack.zip", "./config_check_result", "./ckpt_similarity.json"
_SCRIPTS = (".sh", ".bash", ".py", ".yaml", ".yml", ".toml")
"""Of files that a pack is collected from, and that are no checkpoint."""
VERL, VERL_VERIFY, SLIME = "./verl_param_compare_result", "./verl_param_verify_result", "./slime_param_compare_result"

EPILOG = """\
examples:
  msprobe config_check -d run.sh ds_config.json -o pack.zip     collect: environment, packages, settings of the scripts (nothing is run)
  msprobe config_check RUN GOLDEN                               compare what two runs have written: result.xlsx, result.json, result.html
  msprobe config_check -c good.zip pack.zip -o result           compare two packs
  msprobe config_check run.sh good.sh                           compare what two launch scripts set (nothing is run)
  msprobe config_check --verify good.zip -d run.sh              before a launch: is all as it was in the good run?
  msprobe config_check --ranks pack.zip                         which rank or node of one run differs from the others?
  msprobe config_check -c ckpt_a ckpt_b -o out.json             two checkpoints (msprobe ckpt diff says more)
  msprobe config_check -vc npu.log gpu.log                      the settings that two runs of verl have printed

exit codes:
  0  no difference that matters (harmless ones may be listed); collected
  1  differences
  2  cannot: no pack, a file that cannot be read or written, wrong usage
  3  no difference in what can be compared, and something cannot be: a variable that may change the numbers (its value is masked), a file
     that one pack alone has or that is damaged, a rank that has written nothing, a checkpoint with damage or nothing in common"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of both versions of the existing tool, then ours."""
    parser.add_argument("target", metavar="RUN", nargs="?", help="a pack, an output directory with one, or a launch script")
    parser.add_argument(
        "golden", metavar="GOLDEN", nargs="?", help="the same of a run that is right: -c GOLDEN RUN in the order of all commands"
    )
    do = parser.add_argument_group("what is done")
    do.add_argument("-d", "--dump", nargs="*", metavar="FILE", help="collect a pack; launch scripts, YAML, JSON, TOML, Python files")
    do.add_argument(
        "-c", "--compare", nargs=2, metavar=("BENCH", "CMP"), help="compare two packs (or output directories with one), or two checkpoints"
    )
    do.add_argument("--verify", nargs="+", metavar="PACK", help="GOOD [PACK]: a saved pack against another, or against now (scripts: -d)")
    do.add_argument("--ranks", metavar="PACK", help="the ranks of one pack against each other")
    do.add_argument("-vc", "--verl-compare", "--verl_compare", nargs=2, metavar=("LOG", "BENCH"), help="settings in two logs of verl")
    do.add_argument(
        "-vv", "--verl-verify", "--verl_verify", nargs="+", metavar="FILE", help="[YAML] LOG: settings of a log of verl against wanted ones"
    )
    do.add_argument("-sc", "--slime-compare", "--slime_compare", nargs=2, metavar=("LOG", "BENCH"), help="arguments in two logs of slime")
    do.add_argument("--script-args", metavar="WORDS", help="arguments of the scripts of -d, as one text: '4 8'")
    do.add_argument("--env", nargs="+", default=[], metavar="NAME", help="collect the values of these variables, too; patterns like 'MY_*'")
    do.add_argument("--key-file", metavar="FILE", help="key for digests of values that are not collected")
    out = parser.add_argument_group("what comes out")
    out.add_argument(
        "-o", "--output", metavar="PATH", help=f"pack (default {PACK}), directory ({RESULT}), or JSON of checkpoints ({CHECKPOINT})"
    )
    out.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write JSON; without FILE to the standard output",
    )
    out.add_argument("--html", metavar="FILE", help="write the result as a page")
    out.add_argument("--top", type=int, default=20, metavar="N", help="list N differences of each severity (default: %(default)s)")
    out.add_argument(
        "--columns", choices=("8.1.1", "26.2.0"), default="26.2.0", help="pass_check of that version: TRUE/FALSE or pass/warning/error"
    )
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Exit codes: see the epilog; errors are raised as `ProbeError`, which the entry point turns into 2."""
    _check(args)
    _outputs(args)
    if args.verify:
        return _verify(args)
    if args.ranks:
        return _ranks(args)
    if args.compare:
        return _compare(args)
    if args.dump is None:
        return _logs(args)
    return _collect(args)


def _check(args: argparse.Namespace) -> None:
    from msprobe_engine.core.errors import UsageError

    if args.target is not None:
        if args.golden is None:
            raise UsageError(f"{args.target}: compared with what? give RUN and GOLDEN, or --ranks {args.target}")
        if args.compare is not None:
            raise UsageError(f"-c and {args.target} both say what is compared; give one of them")
        args.compare = [args.golden, args.target]
    asked = [
        flag
        for flag, value in (
            ("-d", None if args.verify else args.dump),
            ("-c", args.compare),
            ("--verify", args.verify),
            ("--ranks", args.ranks),
            ("-vc", args.verl_compare),
            ("-vv", args.verl_verify),
            ("-sc", args.slime_compare),
        )
        if value is not None
    ]
    if not asked:
        raise UsageError(
            "say what to do: RUN GOLDEN to compare runs, -d to collect a pack, -c BENCH CMP to compare two, --verify GOOD, --ranks PACK, "
            "-vc, -vv or -sc"
        )
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} are two things; ask for one")
    if args.verify and len(args.verify) > 2:
        raise UsageError(f"--verify takes a good pack and at most one other, not {len(args.verify)}")
    if args.verify and len(args.verify) == 2 and args.dump is not None:
        raise UsageError("--verify GOOD PACK compares two packs; -d collects what is there now: leave one of them out")
    if args.script_args is not None and not args.dump:
        raise UsageError("--script-args are arguments of the scripts behind -d; name a script there")
    collects = args.dump is not None or (args.verify and len(args.verify) == 1)
    if (args.env or args.key_file) and not collects:
        raise UsageError("--env and --key-file say what is collected; they belong to -d and to --verify GOOD")
    if args.top < 0:
        raise UsageError(f"--top {args.top}: 0 or more is allowed")


def _outputs(args: argparse.Namespace) -> None:
    """Nothing is written over what is read."""
    from msprobe_engine.cli.options.inputs import warn_same_files
    from msprobe_engine.cli.options.outputs import refuse_overwriting, refuse_page_name
    from msprobe_engine.formats.pack.kind import pack_of

    if args.compare or args.verify:
        refuse_page_name(args.output, "--html")
    pair = args.compare or args.verl_compare or args.slime_compare or args.verify or ()
    if len(pair) == 2:
        warn_same_files(*map(pack_of, pair))
    packs = [*(args.compare or ()), *(args.verify or ()), *([args.ranks] if args.ranks else ())]
    read = [*map(pack_of, packs), *map(Path, (*(args.dump or ()), *(args.verl_compare or args.verl_verify or args.slime_compare or ())))]
    refuse_overwriting([("--json", args.json), ("--html", args.html), ("-o", args.output)], read)


def _collect(args: argparse.Namespace) -> int:
    from msprobe_engine.config.collect.pack import collect
    from msprobe_engine.core.process.user_key import read_key

    path, notes = collect(args.dump, args.output or PACK, _script_arguments(args), added=args.env, key=read_key(args.key_file))
    print(f"Pack: {path}")
    _print_remarks("note", notes)
    return 0


def _compare(args: argparse.Namespace) -> int:
    from msprobe_engine.cli.options.outputs import is_run, results_directory
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.core.log import one_line
    from msprobe_engine.find.config.packs import compare_packs, compare_scripts
    from msprobe_engine.find.detect import Run
    from msprobe_engine.formats.pack.kind import NAME, is_pack, pack_of

    bench, cmp = (Run(path).pack_inside or path for path in map(pack_of, args.compare))
    scripts = [path for path in (cmp, bench) if path.suffix in _SCRIPTS and path.is_file()]
    if len(scripts) == 2:
        return _report(args, compare_scripts(bench, cmp), args.output)
    for path in (cmp, bench):
        _refuse_no_side(path)
    for path in (cmp, bench):
        if path in scripts:
            shown, other = one_line(str(path)), one_line(str(bench if path == cmp else cmp))
            raise UsageError(
                f"{shown}: is no pack, as {other} may be: compare two scripts, or collect a pack of this one: "
                f"msprobe config_check -d {shown} -o {one_line(path.stem)}.zip"
            )
    if not is_pack(bench) and not is_pack(cmp):
        if bench.is_dir() and cmp.is_dir() and (is_run(bench) or is_run(cmp)):
            raise UsageError(
                f"{one_line(str(cmp if is_run(cmp) else bench))}: is the directory of a run without {NAME}; runs of msprobe run and of a "
                "probe with config_check have one, msprobe config_check -d SCRIPT collects one"
            )
        return _checkpoints(args)
    output = args.output or results_directory(args.target or "", "config_check", RESULT)
    return _report(args, compare_packs(bench, cmp), output)


def _refuse_no_side(path: Path) -> None:
    """A side that is nothing which could be compared: it is to blame, not the other one."""
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.core.io.regular_files import kind_of_file
    from msprobe_engine.core.log import one_line

    shown = one_line(str(path))
    name_one = "name a pack, a run that has one, a launch script, or a checkpoint"
    if not os.path.lexists(path):
        raise UsageError(f"{shown}: no such file or directory; {name_one}")
    if not os.path.exists(path):
        raise UsageError(f"{shown}: is a link to {one_line(os.readlink(path))}, which is not there; {name_one}")
    if path.is_dir() and path.suffix in _SCRIPTS:
        raise UsageError(f"{shown}: is a directory and no launch script; {name_one}")
    if not path.is_dir() and not path.is_file():
        raise UsageError(f"{shown}: is {kind_of_file(path)} and no file; {name_one}")


def _verify(args: argparse.Namespace) -> int:
    from msprobe_engine.core.process.user_key import read_key
    from msprobe_engine.find.config.packs import verify
    from msprobe_engine.formats.pack.kind import pack_of

    good, *pack = map(pack_of, args.verify)
    key = b"" if pack else read_key(args.key_file)
    result = verify(good, args.dump or (), pack[0] if pack else None, _script_arguments(args), added=args.env, key=key)
    return _report(args, result, args.output)


def _script_arguments(args: argparse.Namespace) -> list[str] | None:
    import shlex

    from msprobe_engine.core.errors import UsageError

    if args.script_args is None:
        return None
    try:
        return shlex.split(args.script_args)
    except ValueError as error:
        raise UsageError(f"--script-args {args.script_args!r}: {error}; words as a shell takes them are allowed") from error


def _report(args: argparse.Namespace, result: Comparison, output: str | None) -> int:
    """Files (a directory only where one was asked for, or is the custom), then text or JSON."""
    from msprobe_engine.core.io.output_files import write_report
    from msprobe_engine.core.log import printable
    from msprobe_engine.report.config import files
    from msprobe_engine.report.config.page import page
    from msprobe_engine.report.config.text import text

    written = files.write_results(result, output, old=args.columns == "8.1.1") if output else []
    if args.html is not None:
        written.append(write_report(Path(args.html), page(result)))
    if args.json not in (None, "-"):
        written.append(write_report(Path(args.json), files.json_text(result)))
    if args.json == "-":
        print(files.json_text(result), end="")
        return result.exit_code
    print(text(result, args.top))
    for path in written:
        print(printable(f"written: {path}"))
    return result.exit_code


def _ranks(args: argparse.Namespace) -> int:
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.core.io.output_files import write_report
    from msprobe_engine.find.config.between_ranks import between_ranks
    from msprobe_engine.find.findings import finite_json
    from msprobe_engine.formats.pack.kind import pack_of

    if args.html is not None or args.output is not None:
        raise UsageError("--ranks prints what it finds; --json FILE writes it, -o and --html belong to -c and --verify")
    result = between_ranks(pack_of(args.ranks))
    text = finite_json(result.as_json()).decode()
    if args.json == "-":
        print(text, end="")
    else:
        if args.json is not None:
            write_report(Path(args.json), text)
        _say_ranks(result, args.top)
    return result.exit_code


def _say_ranks(result: Ranks, top: int) -> None:
    from msprobe_engine.core.log import one_line

    print(one_line(result.headline()))
    for deviation in result.matter[:top]:
        print(one_line(f"  {deviation.sentence()}"))
    if len(result.matter) > top:
        print(f"  ... and {len(result.matter) - top} more")
    harmless = len(result.deviations) - len(result.matter)
    if harmless:
        print(f"  {harmless} harmless difference{'' if harmless == 1 else 's'}")
    if result.matter:
        _print_remarks("cannot tell", result.missing)
    _print_remarks("note", result.notes)


def _checkpoints(args: argparse.Namespace) -> int:
    """As the existing tool: a JSON of weights by name. All that `msprobe ckpt diff` says goes to the console."""
    import json

    from msprobe_engine.core.io.output_files import write_report
    from msprobe_engine.find.checkpoint.diff import diff
    from msprobe_engine.report.checkpoint import files
    from msprobe_engine.report.checkpoint.page import page
    from msprobe_engine.report.checkpoint.text import text

    output = Path(args.output or CHECKPOINT)
    files.refuse_existing(output)
    result = diff(*args.compare)
    written = [write_report(output, json.dumps(files.existing_form(result), indent=4) + "\n")]
    if args.json not in (None, "-"):
        written.append(write_report(Path(args.json), files.json_text(result)))
    if args.html is not None:
        written.append(write_report(Path(args.html), page(result)))
    if args.json == "-":
        print(files.json_text(result), end="")
        return result.code
    print(text(result, args.top))
    for path in written:
        print(f"written: {path}")
    return result.code


def _logs(args: argparse.Namespace) -> int:
    from msprobe_engine.core.errors import UsageError
    from msprobe_engine.find.config import log_files

    if args.json is not None or args.html is not None:
        raise UsageError("-vc, -vv and -sc write a CSV and JSON files to -o; --json and --html belong to -c, --verify and --ranks")
    if args.verl_verify:
        if len(args.verl_verify) > 2:
            raise UsageError(f"-vv takes a log of verl, and before it a YAML file of wanted settings, not {len(args.verl_verify)} files")
        *wanted, log = args.verl_verify
        result = log_files.verify_verl(log, wanted[0] if wanted else None, args.output or VERL_VERIFY)
        _say_logs(result, ("wanted", "the log"), args.top)
        return 1 if result.different else 0  # a setting that the log does not have says nothing
    compare = log_files.compare_verl if args.verl_compare else log_files.compare_slime
    target, golden = args.verl_compare or args.slime_compare
    result = compare(target, golden, args.output or (VERL if args.verl_compare else SLIME))
    _say_logs(result, ("the first log", "the second"), args.top)
    return 1 if result.different or result.only_first or result.only_second else 0


def _say_logs(result: LogComparison, sides: tuple[str, str], top: int) -> None:
    from msprobe_engine.core.log import one_line

    absent = len(result.only_first) + len(result.only_second)
    print(f"{len(result.different)} of {len(result.rows)} settings differ{f'; {absent} are on one side only' if absent else ''}.")
    values = {key: (target, golden) for key, target, golden, _ in result.rows}
    for key in result.different[:top]:
        print(one_line(f"  {key}: {values[key][0]} in {sides[0]}, {values[key][1]} in {sides[1]}"))
    for keys, side in ((result.only_first, sides[0]), (result.only_second, sides[1])):
        for key in keys[:top]:
            print(one_line(f"  {key}: only in {side}"))
    for path in result.written:
        print(one_line(f"written: {path}"))


def _print_remarks(word: str, texts: Iterable[str]) -> None:
    from msprobe_engine.core.log import one_line

    for text in texts:
        print(one_line(f"{word}: {text}"), file=sys.stderr)
