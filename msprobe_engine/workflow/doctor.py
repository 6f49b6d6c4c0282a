"""The check of a device: runs each check in a process of its own and puts what they say into one report.

A check that hangs, dies, breaks the device for its process or takes all memory costs its own lines and no others. This module imports no
framework: the table of checks and what runs one are named by the caller.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.output_files import write_named
from msprobe_engine.core.log import one_line, printable
from msprobe_engine.workflow.check_process import READY, CheckCommand, CheckEnded, TimeUp, answers

Verdict = Literal["ok", "WRONG", "slow", "skipped"]
_MACHINE_SECONDS = 120.0
"""Longest time to import torch, to look for a device and to build the C modules."""
_LEAST = 5.0
"""Seconds that a check is given at least; with fewer left it is not started."""
MACHINE = "machine"
"""Key of the check that describes the machine; its process writes one object of names and texts in place of lines."""


@dataclass(frozen=True)
class Line:
    """One result.

    Attributes:
        figure: what was measured, with its unit.
        why: cause of a verdict other than ``ok``, or a remark.
    """

    name: str
    verdict: Verdict
    figure: str = ""
    goal: str = ""
    why: str = ""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        key: short name, ``A1``.
        seconds: its share of the time: how long it may take when all checks together have ten minutes.
        module: with a function ``run(device)`` that yields lines; imported by the process of the check only.
    """

    key: str
    title: str
    seconds: float
    module: str


@dataclass
class Result:
    """What a check has said, how many seconds it took, whether its process came to its end, and whether its time was too short."""

    check: Check
    lines: list[Line] = field(default_factory=list)
    seconds: float = 0.0
    ended: bool = True
    cut: bool = False

    @property
    def ran(self) -> bool:
        """Has it checked anything?"""
        return any(line.verdict != "skipped" for line in self.lines)

    @property
    def complete(self) -> bool:
        """Has it checked everything?"""
        return self.ended and bool(self.lines) and all(line.verdict != "skipped" for line in self.lines)


@dataclass
class Report:
    """All results, with what describes the machine."""

    machine: dict[str, str]
    results: list[Result] = field(default_factory=list)

    def lines(self, verdict: Verdict) -> list[tuple[Check, Line]]:
        return [(result.check, line) for result in self.results for line in result.lines if line.verdict == verdict]

    @property
    def exit_code(self) -> int:
        """1: something is WRONG; 2: nothing could be checked; 3: nothing is wrong, but time was too short for a check; else 0, also when
        something is slow, or the machine has not what a check needs."""
        if self.lines("WRONG"):
            return 1
        if not any(result.ran for result in self.results):
            return 2
        return 3 if any(result.cut for result in self.results) else 0

    def summary(self) -> list[str]:
        """Sentences: how much was checked, what is wrong, what was left out."""
        ran, complete = sum(result.ran for result in self.results), sum(result.complete for result in self.results)
        wrong = self.lines("WRONG")
        verdict = f"{len(wrong)} WRONG" if wrong else "nothing is wrong in what was checked" if ran else "nothing could be checked"
        said = [f"{verdict}: {ran} of {len(self.results)} checks ran, {complete} of them without a line that was skipped"]
        for kind in ("WRONG", "slow"):
            if entries := self.lines(kind):
                said.append(f"{kind}: " + "; ".join(f"{check.key} {line.name}" for check, line in entries))
        reasons: dict[str, list[str]] = {}
        for check, line in self.lines("skipped"):
            reasons.setdefault(line.why, []).append(f"{check.key} {line.name}")
        return said + [f"skipped ({why}): {'; '.join(names)}" for why, names in reasons.items()]

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        results = [
            {**asdict(result.check), "took": round(result.seconds, 1), "lines": [asdict(line) for line in result.lines]}
            for result in self.results
        ]
        return {"format": 1, "machine": self.machine, "summary": self.summary(), "exit_code": self.exit_code, "checks": results}

    def markdown(self) -> str:
        """For docs/evidence/hardware.md."""
        said = [f"* {name}: {text}" for name, text in self.machine.items()]
        said += ["", *(f"* {text}" for text in self.summary()), "", "| check | | figure | goal | remark |", "|---|---|---|---|---|"]
        for result in self.results:
            for line in result.lines:
                cells = (f"{result.check.key} {line.name}", line.verdict, line.figure, line.goal, line.why)
                said.append("| " + " | ".join(one_line(cell).replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(said) + "\n"


def line_text(check: Check, line: Line) -> str:
    goal = f" (goal {line.goal})" if line.goal else ""
    figure = f": {line.figure}" if line.figure else ""
    why = f"  {line.why}" if line.why and line.verdict != "skipped" else f" ({line.why})" if line.why else ""
    return one_line(f"{line.verdict:8} {check.key:3} {line.name}{figure}{goal}{why}")


def choose(checks: Sequence[Check], only: str) -> list[Check]:
    """The checks whose keys are named, ``A1,B2``, or all; a letter stands for all keys that begin with it.

    Raises:
        UsageError: there is no such check.
    """
    wanted = [key.strip().upper() for key in only.split(",") if key.strip()]
    if not wanted:
        return list(checks)
    for key in wanted:
        if not any(check.key.startswith(key) for check in checks):
            raise UsageError(f"--only: there is no check {key}; allowed: {', '.join(check.key for check in checks)}")
    return [check for check in checks if any(check.key.startswith(key) for key in wanted)]


def describe(command: CheckCommand, seconds: float) -> dict[str, str]:
    """What the machine is; ``device`` is the type that is checked, and its name.

    Raises:
        UsageError: no check could run here.
    """
    said: dict[str, str] = {}
    try:
        for answer in answers(command, MACHINE, seconds):
            said.update(answer)
    except (CheckEnded, TimeUp) as error:
        raise UsageError(f"nothing can be checked: {str(error).partition(': RuntimeError: ')[2] or error}") from None
    if "device" not in said:
        raise UsageError("nothing can be checked: the process that describes the machine said nothing")
    return said


def run(
    checks: Sequence[Check], command: CheckCommand, budget: float, report: Report, write: Callable[[Report], None] = lambda _: None
) -> None:
    """Run `checks` one after the other, print what they say and put it into `report`. Which one runs is printed on the standard error.

    Args:
        budget: seconds for all of them. Each gets its own `seconds`, and what others have left over; where that is less than nothing, its
            share of what there is. What it takes to start the processes is kept back.
        write: given the report after each check.
    """
    end, start = time.monotonic() + budget, 0.0
    for number, check in enumerate(checks):
        left, wanted = end - time.monotonic() - start * (len(checks) - number), sum(later.seconds for later in checks[number:])
        box = check.seconds + left - wanted if left > wanted else check.seconds * left / wanted
        result = Result(check)
        report.results.append(result)
        if box < min(_LEAST, check.seconds):
            result.cut = True
            _add(result, Line(check.title, "skipped", why="no time left: give it more with --budget"))
            continue
        print(f"... {check.key} {check.title}, some {min(box, check.seconds):.0f} s", file=sys.stderr, flush=True)
        begin = time.monotonic()
        try:
            for answer in answers(command, check.key, box):
                if READY in answer:
                    start = time.monotonic() - begin
                else:
                    _add(result, _line(answer))
        except CheckEnded as error:
            result.ended = False
            _add(result, Line(check.title, "WRONG", why=str(error)))
        except TimeUp as error:
            result.cut = True
            _add(result, Line("the rest" if result.lines else check.title, "skipped", why=str(error)))
        result.seconds = time.monotonic() - begin
        if not result.lines:
            result.ended = False
            _add(result, Line(check.title, "WRONG", why="the check ended without a result"))
        write(report)


def _add(result: Result, line: Line) -> None:
    result.lines.append(line)
    print(line_text(result.check, line), flush=True)


def _line(answer: Mapping[str, Any]) -> Line:
    line = Line(**answer)
    return line if line.verdict in get_args(Verdict) else Line(line.name, "WRONG", why=f"unknown verdict {line.verdict}")


def execute(args: argparse.Namespace, table: str, runner: str) -> int:
    """What ``msprobe doctor`` does with its options: choose, describe the machine, run, print and write.

    Args:
        table: module with the tuple CHECKS.
        runner: module that runs one check, for `CheckCommand`.

    Returns:
        the exit code.

    Raises:
        UsageError: an option cannot be followed, or nothing can be checked.
    """
    if not args.budget > 0:
        raise UsageError(f"--budget {args.budget}: allowed are seconds above 0")
    begin, root = time.monotonic(), str(Path(__file__).resolve().parents[2])  # of a source tree that is not installed
    sys.path[:0] = [] if root in sys.path else [root]
    checks = choose(importlib.import_module(table).CHECKS, ",".join(args.only))
    if args.list:
        print("\n".join(f"{check.key:3} {check.title} ({check.seconds:.0f} s of ten minutes)" for check in checks))
        return 0
    for path in filter(None, (args.json, args.markdown)):
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: there is no directory {path.absolute().parent}")
        try:
            path.open("ab").close()
        except OSError as error:  # said before the checks, not behind them
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    if args.peer and not (Path(args.peer) / "msprobe").is_dir():
        raise UsageError(f"--peer {args.peer}: it has no directory msprobe; allowed: where pip install --target has put the existing tool")
    command = CheckCommand(runner, ("--device", args.device) if args.device else (), (root,))
    machine = describe(command, min(_MACHINE_SECONDS, args.budget))
    for name, text in machine.items():
        print(printable(f"{name}: {text}"), flush=True)
    report = Report(machine)
    options = ("--device", machine["device"].split()[0], *(("--peer", args.peer) if args.peer else ()))

    def write(so_far: Report) -> None:
        if args.json:
            write_named(args.json, [(json.dumps(so_far.as_dict(), indent=1) + "\n").encode()])
        if args.markdown:
            write_named(args.markdown, [so_far.markdown().encode()])

    def write_early(so_far: Report) -> None:
        with contextlib.suppress(OSError):  # a disk that is full ends no checks: it is said behind them
            write(so_far)

    run(checks, CheckCommand(runner, options, (root,)), args.budget - (time.monotonic() - begin), report, write_early)
    print("\n".join(["", *map(printable, report.summary())]), flush=True)
    write(report)
    return report.exit_code
