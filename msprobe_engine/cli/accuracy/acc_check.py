"""Run the API calls of a dump again, on a device and in higher precision, and say of each whether its result is right. Forward, and
backward where the dump has it. Inputs are the saved tensors of the dump (task tensor), else drawn from its statistics."""

from __future__ import annotations

import argparse

EPILOG = """\
examples:
  msprobe acc_check -api_info dump/step0/rank0/dump.json -o output     accelerator (or CPU) against the CPU in float64
  msprobe acc_check dump/step0/rank0 -d cpu --dtype bfloat16           what bfloat16 costs each call
  msprobe acc_check dump/step0/rank0 --compiled                        the compiler's kernels
  msprobe acc_check dump/step0/rank0 --operators formulas.py ops.yaml  formulas of one's own: functions, and which operators they check
  msprobe -f pytorch run_ut -api_info dump.json -d 1 -save_error_data  as 8.1.1; run_ut is the same command
  msprobe acc_check dump/step0/rank0 -csv_path output/accuracy_checking_result_20260101120000.csv     go on after an interruption
  msprobe acc_check -api_info dump.json --compat                       files and statuses exactly as the existing tool has them

exit codes:
  0  no error found (with --compat: done)
  1  calls whose result is wrong (with --compat never)
  2  wrong usage, settings or input, no such device
  3  no error found, but some calls took their process down, ran out of time or do not fit into memory,
     saved tensors cannot be read, or the check itself has failed on a call ("could not be judged")"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dump", metavar="DUMP", nargs="?", help="the same as -api_info: dump.json, or the directory of a rank")
    add("-api_info", "--api_info_file", metavar="FILE", help="dump.json of one rank, level L1 or mix")
    add("-o", "--out_path", default="./", metavar="DIR", help="where the result files go (default: %(default)s)")
    add("-save_error_data", action="store_true", help="save inputs and results of calls that do not pass")
    add("-j", "--jit_compile", action="store_true", help="compile mode of an NPU")
    add("-d", "--device", nargs="+", default=["auto"], metavar="N", help="what is checked: numbers of accelerators, or cpu, cuda:1, ...")
    add("-csv_path", "--result_csv_path", metavar="FILE", help="result of an interrupted check: do the rest")
    add("-f", "--filter_api", action="store_true", help="leave out calls that repeat an earlier one with other numbers")
    add("-config", "--config_path", metavar="FILE", help="config.json with a section run_ut, or config.yaml")
    add("-n", "--num_splits", type=int, default=0, metavar="N", help="processes, 1 to 64 (default: by cores and calls)")
    group = parser.add_argument_group("what is checked against what")
    group.add_argument("--dtype", metavar="TYPE", help="round all floating inputs to this type first: bfloat16, float16, float32")
    group.add_argument("--compiled", action="store_true", help="check what the framework's compiler makes of each call")
    group.add_argument("--bench", default="cpu", metavar="DEVICE", help="where the reference runs (default: %(default)s)")
    group.add_argument(
        "--operators",
        nargs="+",
        default=[],
        metavar="FILE",
        help="Python files with operators or formulas of your own; YAML files that say which formula is whose "
        "(operators: {NAME: {forward: FUNCTION}})",
    )
    group.add_argument(
        "--bench_dtype", choices=("float64", "raised"), help="precision of the reference; raised: one step up (default: float64)"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--compat",
        nargs="?",
        const="8.1.1",
        choices=("8.1.1", "26.2.0"),
        help="precision, statuses and files of that version of the existing tool (default: 8.1.1)",
    )
    how.add_argument("--no_condition", action="store_true", help="faster, less exact: what operators make of round-off is not measured")
    how.add_argument("--seed", type=int, default=1234, metavar="N", help="of drawn inputs and random state (default: %(default)s)")
    how.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for one call (default: %(default)g)")
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    """Exit codes: see the epilog; errors are raised as `ProbeError`, which the entry point turns into 2."""
    from msprobe_engine.accuracy.settings import load_precheck_settings
    from msprobe_engine.core.log import get_logger, printable

    settings, remarks = load_precheck_settings(args.config_path)
    for remark in remarks:
        get_logger().warning("%s", printable(remark))
    _check(args, settings.is_online)
    from msprobe_engine.accuracy.precheck.options import Options

    options = Options(
        devices=tuple(f"auto:{word}" if word.isdigit() else word for word in args.device),
        dtype=args.dtype,
        compiled=args.compiled,
        bench=args.bench,
        bench_dtype=args.bench_dtype or ("raised" if args.compat else "float64"),
        jit_compile=args.jit_compile,
        seed=args.seed,
        processes=args.num_splits,
        timeout=args.timeout,
        operators=tuple(args.operators),
        compat=args.compat,
        filter_api=args.filter_api,
        save_error_data=args.save_error_data,
        condition=not (args.no_condition or args.compat),
    )
    if settings.is_online:
        from msprobe_engine.accuracy.online.serve import serve

        received = serve(settings, options, args.out_path)
        print(printable(received.text()))
        return received.exit_code
    from msprobe_engine.accuracy.precheck.run import check_dump

    result = check_dump(args.api_info_file or args.dump, settings, options, args.out_path, args.result_csv_path)
    print(printable(result.text()))
    return result.exit_code


def _check(args: argparse.Namespace, online: bool) -> None:
    """Flags that cannot be."""
    from msprobe_engine.core.errors import UsageError

    devices = " ".join(args.device)
    rules = (
        (args.dump and args.api_info_file, f"{args.dump}: -api_info says already what is checked; leave one of them out"),
        (not (args.dump or args.api_info_file or online), "give the dump.json of one rank (-api_info)"),
        (online and (args.dump or args.api_info_file), "is_online is true in the config: calls come from a training; leave -api_info out"),
        (online and args.result_csv_path, "-csv_path: the online pre-check goes on by itself, from its spool; leave -csv_path out"),
        (not 0 <= args.num_splits <= 64, f"-n {args.num_splits}: 1 to 64 processes are allowed (0: by cores and calls)"),
        (not all(map(_is_device, args.device)), f"-d {devices}: write numbers from 0, or names like cpu, cuda, npu:1"),
        (len(set(args.device)) < len(args.device), f"-d {devices}: name each device once"),
        (not args.timeout > 0, f"--timeout {args.timeout:g}: seconds above 0 are allowed"),
        (args.compat and (args.dtype or args.compiled), "--compat and --dtype or --compiled: the existing tool has none of these"),
    )
    for wrong, sentence in rules:
        if wrong:
            raise UsageError(sentence)


def _is_device(word: str) -> bool:
    kind, _, number = word.partition(":")
    return word.isdecimal() or (kind.isidentifier() and (number.isdecimal() or word == kind))
