"""``--json`` of every command that answers and has no form of its own: one object on the standard output, whatever the end.

``{"command", "exit_code", "meaning", "lines", "answer", "error"}``: what is said to people, line by line, and where the command writes a
JSON file of its result, what is in it. Warnings go to the standard error, as without it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

MEANINGS = {
    0: "nothing was found",
    1: "something was found",
    2: "wrong usage, or nothing that can be read",
    3: "not everything could be read or compared",
    4: "a bug in this tool",
}
"""Of exit codes."""
_WITHOUT = ("run", "init", "settings migrate", "settings schema", "parse")
"""Commands that become another program, print a file, or are interactive."""


def add_json_answer(parser: argparse.ArgumentParser, name: str) -> None:
    """Give the command the option, unless it has one of its own."""
    if name not in _WITHOUT and "--json" not in parser._option_string_actions:
        parser.add_argument(
            "--json",
            dest="json_answer",
            action="store_true",
            help="print one JSON object: exit code, the lines, the result where there is a file of it",
        )


def run_with_json(name: str, args: argparse.Namespace) -> int:
    """Run the command and print its answer; what it raises is printed, and raised again.

    A command names the JSON file of its result in ``args.answer_file``.
    """
    from msprobe_engine.cli.exit_codes import explain_error

    said = io.StringIO()
    answer: dict[str, Any] = {"command": name, "exit_code": 0, "meaning": "", "lines": [], "answer": None, "error": None}
    try:
        with contextlib.redirect_stdout(said):
            answer["exit_code"] = int(args.run(args))
        answer["answer"] = _read_answer(getattr(args, "answer_file", None))
    except Exception as error:
        answer["error"], answer["exit_code"] = explain_error(error, args)
        raise
    finally:
        answer |= {"meaning": MEANINGS.get(answer["exit_code"], ""), "lines": said.getvalue().splitlines()}
        print(json.dumps(answer, indent=2))
    return int(answer["exit_code"])


def _read_answer(path: Path | None) -> Any:
    return None if path is None else json.loads(path.read_text(encoding="utf-8"))
