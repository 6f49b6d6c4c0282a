"""Put the alerts of all ranks into the order of execution and say where it began. Reads what the monitor wrote, ours or the existing
tool's."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

_INCIDENT = re.compile(r"step(\d{1,18})-")
EPILOG = """\
examples:
  msprobe monitor analyze monitor_output
  msprobe monitor analyze monitor_output -k 20 -s 1,2 -o out
  msprobe monitor analyze monitor_output/anomaly_detected       the existing tool's alerts

exit codes: 0 no alerts, 1 alerts were found, 2 no data or wrong usage, 3 no alerts, but something is missing or could not be read"""


def steps(text: str) -> frozenset[int]:
    """``1,2`` or ``[1,2]`` as a set; empty: every step."""
    inner = text.strip().removeprefix("[").removesuffix("]").strip()
    try:
        return frozenset(int(part) for part in inner.split(",")) if inner else frozenset()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of steps; allowed: 1,2 or [1,2]") from None


def positive(text: str) -> int:
    """An int of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: an int >= 1")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and the options of the existing tool: -o, -k, -s."""
    parser.add_argument("run_path", metavar="RUN", help="directory of a monitored run, or anomaly_detected of the existing tool")
    _options(parser, "RUN")
    parser.epilog = EPILOG


def _options(parser: argparse.ArgumentParser, place: str) -> None:
    parser.add_argument("-o", "--out_path", default="", metavar="DIR", help=f"where anomaly_analyse.json goes (default: {place})")
    parser.add_argument("-k", "--topk", type=positive, default=8, metavar="N", help="how many of the first alerts to keep (default: 8)")
    parser.add_argument("-s", "--step", type=steps, default=frozenset(), metavar="STEPS", help="only these steps: 1,2 or [1,2]")


def run(args: argparse.Namespace) -> int:
    """0 no alerts, 1 alerts were found, 3 none in what could be read.

    Errors are raised as `ProbeError`, which the entry point turns into 2."""
    code, args.answer_file = report(args.run_path, args.out_path, args.topk, args.step)
    return code


def report(path: str, output: str, top: int, wanted: frozenset[int]) -> tuple[int, Path]:
    """Analyze and print; 1 when there are alerts, 3 when there are none in what is here and could be read, with the file of the result."""
    from msprobe_engine.core.log import printable
    from msprobe_engine.formats.monitor.alert_order import analyze, summary

    result = analyze(Path(path), Path(output) if output else None, top, wanted)
    directories = incidents(Path(path))
    said = (
        summary(result).replace("nan_analyze -i DUMP", f"nan_analyze -i {shlex.quote(str(directories[0]))}")
        if directories
        else summary(result)
    )
    print("\n".join(printable(line) for line in said.splitlines()))
    for sentence in result.found.notes:
        print(printable(f"note: {sentence}"))
    for sentence in result.found.missing:
        print(printable(f"warning: {sentence}"), file=sys.stderr)
    for problem, count in result.found.problems.items():
        print(printable(f"warning: {problem}" + (f" ({count} times)" if count > 1 else "")), file=sys.stderr)
    if directories:
        more = f", {len(directories) - 1} more" if len(directories) > 1 else ""
        print(printable(f"Incident, with what to run next: {directories[0] / 'summary.md'}{more}"))
    lost = result.found.left_out + len(result.found.missing)
    if directories and not result.found.anomalies:
        lost += 1
        print("warning: the run has an incident, which an alert makes, and no alert of it is here", file=sys.stderr)
    print(f"Details: {result.path}")
    return 1 if result.began is not None else 3 if lost else 0, result.path


def incidents(run: Path) -> list[Path]:
    """Directories of what led to critical alerts of a run, the earliest step first."""
    if run.is_symlink() or not run.is_dir():
        return []
    numbered = [(int(name[1]), path.parent) for path in run.glob("incidents/*/summary.md") if (name := _INCIDENT.match(path.parent.name))]
    return [path for _, path in sorted(numbered)]


def main(argv: Sequence[str] | None = None) -> int:
    """The existing tool's ``python -m msprobe.core.monitor.anomaly_processor``: its options, and 0 also when there are alerts."""
    from msprobe_engine.cli.exit_codes import run_command

    parser = argparse.ArgumentParser(prog="anomaly_processor", description=__doc__, allow_abbrev=False)
    parser.add_argument("-d", "--data_path", required=True, metavar="DIR", help="directory anomaly_detected, or that of the run")
    _options(parser, "DIR")
    parser.set_defaults(debug=False)
    args = parser.parse_args(argv)

    def command() -> int:
        report(args.data_path, args.out_path, args.topk, args.step)
        return 0

    return run_command("anomaly_processor", command, args)
