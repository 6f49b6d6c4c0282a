"""Make a script of one recorded API call: it runs the call once more, forward and backward, compares it with a bench in higher precision,
and needs nothing but the framework."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

EPILOG = """\
examples:
  msprobe op_generate --dump dump/step0/rank0 --api Functional.softmax.3 -o scripts
  msprobe op_generate --dump dump/step0/rank0 --api softmax -o scripts          all calls of softmax
  msprobe -f pytorch op_generate -i config_op.json -o scripts                   as the existing tool
  python scripts/Functional.softmax.3.py --device cuda

exit codes: 0 written, 1 some calls cannot be repeated by a script, 2 wrong usage or input"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the existing tool 8.1.1 (-i, -o), and those of the short form."""
    add = parser.add_argument
    add("-i", "--config_input", metavar="FILE", help="config_op.json, with the keys of the existing tool")
    add("-o", "--api_output_path", required=True, metavar="DIR", help="where the script goes, and its tensors")
    add("--dump", metavar="PATH", help="dump.json, a directory of a dump or of its run, in place of -i")
    add("--api", action="append", default=[], metavar="NAME", help="Torch.matmul.0: this call; matmul: all of its API; may be repeated")
    add("--step", type=int, metavar="N", help="of the dump, where it has several")
    add("--rank", type=int, metavar="R", help="of the dump, where it has several")
    add("--direction", choices=("forward", "backward", "both"), default="both", help="what is compared (default: both)")
    add("--random", action="store_true", help="draw inputs from the recorded statistics")
    add("--seed", type=int, default=0, metavar="N", help="of drawn inputs (default: 0)")
    add("--iterations", type=int, default=1, metavar="N", help="runs of the script, each with a seed of its own (default: 1)")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """0: all written; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from pathlib import Path

    from msprobe_engine.accuracy.scripts.generate import calls_of, find_call, generate, read_extracted, read_source, write_extracted
    from msprobe_engine.accuracy.scripts.literals import CannotWrite
    from msprobe_engine.accuracy.scripts.request import read_request
    from msprobe_engine.accuracy.scripts.source import Options
    from msprobe_engine.core.errors import SettingsError, UsageError
    from msprobe_engine.core.log import printable

    if bool(args.config_input) == bool(args.dump):
        raise UsageError("give either -i config_op.json, or --dump and --api")
    if args.config_input:
        request = read_request(Path(args.config_input))
        options = Options(request.direction, request.real, request.seed, request.iterations)
        if request.dump is not None:
            source = read_source(request.dump)
            wanted = [request.api]
            if request.extracted is not None:
                write_extracted(Path(request.extracted), find_call(source, request.api), source)
        else:
            source = read_extracted(Path(request.extracted or ""))
            wanted = [request.api or next(iter(source.data))]
    else:
        if not args.api:
            raise SettingsError("--api: say which call, as Torch.matmul.0, or of which API, as matmul")
        if args.iterations < 1 or args.seed < 0:
            raise UsageError(f"--iterations {args.iterations} --seed {args.seed}: allowed are 1 and more, and 0 and more")
        options = Options(args.direction, not args.random, args.seed, args.iterations)
        source = read_source(args.dump, args.step, args.rank)
        wanted = [name for given in args.api for name in calls_of(source, given)]
    dialect, loader = _framework(source.framework, source.data, wanted[0].removesuffix(".forward"))
    refused = 0
    for name in wanted:
        try:
            written = generate(source, find_call(source, name), dialect, loader, options, Path(args.api_output_path))
        except CannotWrite as error:
            if len(wanted) == 1:
                raise
            refused += 1
            print(printable(f"{error}"))
            continue
        values = f"{written.files} tensors beside it" if written.files else "no tensors"
        drawn = f"; drawn: {', '.join(written.drawn[:6])}{' ...' if len(written.drawn) > 6 else ''}" if written.drawn else ""
        print(printable(f"{written.path}: {values}{drawn}"))
    if refused:
        print(f"{refused} of {len(wanted)} calls cannot be repeated by a script")
    return int(refused > 0)


def _framework(name: str, data: Mapping[str, Any], wanted: str) -> tuple[Any, Any]:
    """What writes scripts of a dump's framework, and what reads its tensors; where the file does not name it (extracted calls), its tensors
    do. Dumps of MSAdapter have torch's names.

    Raises:
        MissingExtraError, UsageError: it is not installed here.
    """
    from msprobe_engine.core.backend import load_backend
    from msprobe_engine.core.errors import MissingExtraError
    from msprobe_engine.formats.dump.rank_files import framework_of

    mindspore = framework_of({"framework": name}, [data.get(f"{wanted}.forward")]) == "mindspore"
    try:
        backend: Any = load_backend("mindspore" if mindspore else "torch")
    except ImportError:
        if mindspore:
            raise
        raise MissingExtraError("torch", "torch", "op_generate") from None
    return backend.script_dialect(), backend
