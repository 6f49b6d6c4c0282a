"""Entry point of ``msprobe``: finds the sub-command and imports its file only then.

Nothing heavy is imported here, so that ``msprobe --help`` answers at once; sub-commands import what they need in `run`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine import __version__
from msprobe_engine.cli.exit_codes import DONE, WRONG, run_command
from msprobe_engine.cli.options.arguments import Parser, replace_latest
from msprobe_engine.cli.options.json_answer import add_json_answer, run_with_json
from msprobe_engine.core.process.variables import warn_unknown_variables


class Command(NamedTuple):
    """Where a sub-command lives and what it does, in one line."""

    module: str
    help: str


COMMANDS = {
    # Watch
    "run": Command("launch.run", "run a launch line with the probe in every training process it starts"),
    "init": Command("launch.init", "write a commented settings file to begin with: probe.yaml"),
    "settings": Command("settings", "check a settings file, migrate an old one; the JSON Schema for editors (check, migrate, schema)"),
    "doctor": Command(
        "launch.doctor", "check on this machine that the numbers are right, that a training stays as it is, and what it costs"
    ),
    "frameworks": Command("launch.frameworks", "say which training frameworks are here, and what the probe does not find in them"),
    "estimate": Command("launch.estimate", "say what a dump will cost in disk and time, before it is made"),
    # Find
    "diagnose": Command("analysis.diagnose", "say what is wrong with a run, alone or against one that is right: one page"),
    "nan_analyze": Command("analysis.nan_analyze", "find the operator where the first NaN or Inf was born, over all ranks of a step"),
    "monitor": Command("monitor", "work with what the monitor has written (analyze, report, learn, csv2tb)"),
    "acc_check": Command("accuracy.acc_check", "run the API calls of a dump again: is each result right? (run_ut, multi_run_ut)"),
    "op_generate": Command("accuracy.op_generate", "make a script that repeats one recorded API call and judges it"),
    # Compare
    "compare": Command("analysis.compare", "compare the dumps of two runs: where the difference begins, and a table per rank"),
    "graph": Command("graphs.graph", "draw a dump, or two beside each other, as a graph: one page, .vis.db, .vis, Model Explorer"),
    "trends": Command("analysis.trends", "show how the numbers of a run went, or of two: heat maps of steps, ranks and layers on one page"),
    "ckpt": Command("ckpt", "compare checkpoints of any format and parallel layout (diff, digest, show)"),
    "config_check": Command(
        "settings.config_check", "compare what two runs were started with: settings, environment, packages, weights, samples"
    ),
    "grad_probe": Command("grad_probe", "compare the gradient directions of two runs (compare)"),
    # Inspect
    "show": Command("analysis.show", "list what an output directory holds: dumps, monitor files, incidents, reports"),
    "parse": Command("convert.parse", "convert saved tensors to .pt or .npy; without -d the interactive tool of 8.1.1"),
    "code_mapping": Command("convert.code_mapping", "say which source lines the tensors of a MindSpore kernel dump come from"),
    "data2db": Command("convert.data2db", "put monitor files or dumps into a trend data base (SQLite)"),
    "certs": Command("certs", "make TLS certificates for the hosts of an online pre-check (init, host, show, revoke, crl)"),
    # Compatibility
    "graph_visualize": Command("graphs.graph_visualize", "graph with the flags of 26.2.0"),
    "merge_result": Command("analysis.merge_result", "put chosen rows of the tables of many ranks into one file, a sheet per metric"),
    "api_precision_compare": Command("accuracy.api_precision_compare", "compare the pre-checks of two devices: which of them errs more"),
    "run_overflow_check": Command("accuracy.run_overflow_check", "run the APIs of an overflow dump again: normal or abnormal overflow"),
}
SECTIONS = {"Watch": "run", "Find": "diagnose", "Compare": "compare", "Inspect": "show", "Compatibility": "graph_visualize"}
"""Titles in the list of commands, and the command that each begins with."""
GROUPS = ("certs", "ckpt", "grad_probe", "monitor", "settings")
"""Commands that have sub-commands: the table ``COMMANDS`` of their file."""
ALIASES = {
    "check-config": "settings check",
    "multi_acc_check": "acc_check",
    "multi_run_ut": "acc_check",
    "overflow_check": "nan_analyze",
    "run_ut": "acc_check",
}
"""Earlier names, and names of the existing tool's other versions."""

EXAMPLES = """\
examples:
  msprobe run -- torchrun --nproc_per_node 8 train.py
  msprobe show msprobe_output
  msprobe diagnose msprobe_output/latest
  msprobe diagnose RUN GOLDEN
  msprobe monitor report msprobe_output/latest
  msprobe help nan_analyze
  msprobe help symptoms            which command to take for which symptom
  msprobe help assistants          which command answers which question, for coding assistants"""

PAGES = {"assistants": "for-assistants.md", "symptoms": "symptoms.md"}
"""Pages of the docs that ``msprobe help`` prints."""

EXIT_CODES = """\
exit codes:
  0    done
  1    done, and something was found (acc_check, api_precision_compare, compare, diagnose, doctor, graph, nan_analyze, monitor
       analyze, monitor learn --check, grad_probe compare, config_check, certs show, ckpt diff, frameworks) or does not fit (estimate)
  2    wrong usage, settings or input; the message says what to do; nothing could be checked (doctor)
  3    nothing found, but something could not be read (api_precision_compare, compare, diagnose, graph, merge_result, monitor,
       nan_analyze, trends, and any command whose files hold what no reader expects) or run (acc_check)
  4    a bug in this tool: please report it with the output of --debug
  130  interrupted"""


def _symptoms_text(page: str) -> str:
    """The page of symptoms for a terminal, without Markdown: below each symptom the command, and the name of the page on it."""
    lines: list[str] = []
    for line in re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", page).replace("`", "").splitlines():
        if not line.startswith("|"):
            lines.append(line.lstrip("# "))
        elif not line.startswith(("| symptom |", "| ---")):
            symptom, command, name = line.strip("| ").split(" | ")
            lines += [symptom, f"    {command}", f"    page: {name}"]
    return "\n".join([*lines, ""])


def _parser_of_commands(prog: str, usage: str, description: str, commands: Mapping[str, Command], examples: str) -> argparse.ArgumentParser:
    width = max(map(len, commands)) + 2
    titles = {first: title for title, first in SECTIONS.items()} if commands is COMMANDS else {}
    lines = []
    for name, command in commands.items():
        if name in titles:
            lines.append(f"\n {titles[name]}")
        lines.append(f"  {name:{width}}{command.help}")
    table = "\n".join(lines)
    return Parser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=f"commands:\n{table}\n\n{examples}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _top_parser() -> argparse.ArgumentParser:
    parser = _parser_of_commands(
        "msprobe",
        "msprobe [-h] [-V] [--debug] [-f FRAMEWORK] COMMAND ...   |   msprobe help COMMAND",
        "Finds where the numbers of a large training run go wrong: which step, rank, module and operator.",
        COMMANDS,
        EXAMPLES,
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument(
        "-f", "--framework", choices=("pytorch", "mindspore"), help="accepted for existing scripts; a dump says itself what it is of"
    )
    return parser


def _split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Global options, and the command with all that follows it."""
    i = 0
    while i < len(argv) and argv[i].startswith("-"):
        i += 2 if argv[i] in ("-f", "--framework") else 1
    return list(argv[:i]), list(argv[i:])


def all_commands() -> list[str]:
    """The names `sub_parser` takes: ``show``, ``monitor analyze``, ..."""
    return sorted(f"{name} {sub}" if sub else name for name in COMMANDS for sub in (_group(name).COMMANDS if name in GROUPS else ("",)))


def _group(name: str) -> Any:
    return importlib.import_module(f"msprobe_engine.cli.{COMMANDS[name].module}")


def _group_parser(name: str) -> argparse.ArgumentParser:
    group = _group(name)
    return _parser_of_commands(f"msprobe {name}", "msprobe " + name + " [-h] COMMAND ...", group.__doc__, group.COMMANDS, group.EXAMPLES)


def _unknown(prog: str, word: str, commands: Sequence[str], known: Sequence[str]) -> int:
    near = difflib.get_close_matches(word.replace("-", "_"), known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    print(f"{prog}: unknown command '{word}'; {hint}Commands: {', '.join(commands)}", file=sys.stderr)
    return WRONG


def sub_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one sub-command (``show``, ``monitor analyze``); imports its file."""
    group, _, command = name.partition(" ")
    table = _group(group).COMMANDS if command else COMMANDS
    module = importlib.import_module(f"msprobe_engine.cli.{table[command or group].module}")
    parser = Parser(
        prog=f"msprobe {name}",
        description=(module.__doc__ or "").replace("`", ""),
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    module.add_arguments(parser)
    add_json_answer(parser, name)
    parser.accept_all_spellings()
    parser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return the exit code.

    Raises:
        SystemExit: ``--help`` and usage errors, as argparse does.
    """
    before, rest = _split_arguments(sys.argv[1:] if argv is None else argv)
    top = _top_parser()
    options = top.parse_args(before)
    if options.version or rest == ["version"]:
        print(f"msprobe {__version__}")
        return DONE
    if not rest:
        top.print_help(sys.stderr)
        return WRONG
    if rest[0] == "help":
        if not rest[1:]:
            top.print_help()
            return DONE
        if rest[1:] and (page := PAGES.get(rest[1])):
            text = Path(__file__).with_name(page).read_text(encoding="utf-8")
            print(_symptoms_text(text) if rest[1] == "symptoms" else text, end="")
            return DONE
        rest = [*(word for word in rest[1:] if not word.startswith("-")), "--help"]
    name, *given = [*ALIASES.get(rest[0], rest[0]).split(), *rest[1:]]
    if name not in COMMANDS:
        return _unknown("msprobe", rest[0], list(COMMANDS), [*COMMANDS, *ALIASES])
    if name in GROUPS:
        if not given or given[0].startswith("-"):
            parser = _group_parser(name)
            parser.parse_args(given)
            parser.print_help(sys.stderr)
            return WRONG
        commands = list(_group(name).COMMANDS)
        if given[0] not in commands:
            return _unknown(f"msprobe {name}", given[0], commands, commands)
        name, given = f"{name} {given[0]}", given[1:]
    if name != "run":  # the training that it starts says it
        warn_unknown_variables()
    args = argparse.Namespace(debug=options.debug)

    def command() -> int:
        sub_parser(name).parse_args(given, args)
        if name != "run":
            replace_latest(args)
        return run_with_json(name, args) if getattr(args, "json_answer", False) else int(args.run(args))

    return run_command(f"msprobe {name}", command, args)


if __name__ == "__main__":
    sys.exit(main())
