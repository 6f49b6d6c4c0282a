"""docs/reference/cli.md lists every command with its options, as the parsers have them."""

from __future__ import annotations

import argparse
from pathlib import Path

from msprobe_engine.cli.main import ALIASES, COMMANDS, SECTIONS, all_commands, sub_parser

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
INTRODUCTION = """\
# Commands

`msprobe help COMMAND` prints all of this with examples. RUN is an output directory or a part of it, GOLDEN the same of a run that is right.
`--debug` shows the traceback of an error. `--json` prints the answer of most commands as one JSON object on the standard output.
Exit codes are the same everywhere:

| code | means |
| --- | --- |
| 0 | nothing was found, or done |
| 1 | something was found, or does not fit |
| 2 | wrong usage, settings or input, or nothing to read |
| 3 | nothing was found, but not everything could be read or compared |
| 4 | a bug in msprobe: run again with `--debug` and report it |
| 130 | interrupted |

`msprobe run` ends with the exit code of the launch line. This page is made from the code: `python tests/packaging/test_cli_page.py`.
"""


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("%%", "%").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _option(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    value = "" if action.nargs == 0 or not action.option_strings else f" {action.metavar or action.dest.upper()}"
    choices = f" ({', '.join(map(str, action.choices))})" if action.choices is not None else ""
    return f"| `{name}{value}` | {_text(action.help)}{choices} |"


def page() -> str:
    """The page, in the order of ``msprobe --help``."""
    titles = {first: title for title, first in SECTIONS.items()}
    other_names = {name: sorted(alias for alias, target in ALIASES.items() if target == name) for name in all_commands()}
    parts = [INTRODUCTION]
    for first, command in COMMANDS.items():
        if first in titles:
            parts.append(f"## {titles[first]}\n")
        for name in (each for each in all_commands() if each == first or each.startswith(f"{first} ")):
            parser = sub_parser(name)
            said = _text(command.help if name == first else parser.description).rstrip(".")
            said = said[:1].upper() + said[1:]
            also = f" Also: {', '.join(f'`{alias}`' for alias in other_names[name])}." if other_names[name] else ""
            rows = [
                _option(action) for action in parser._actions if action.dest not in ("help", "debug") and action.help != argparse.SUPPRESS
            ]
            table = "\n".join(["| option | meaning |", "| --- | --- |", *rows]) + "\n" if rows else ""
            parts.append(f"### `msprobe {name}`\n\n{said}.{also}\n\n{table}")
    return "\n".join(parts).rstrip() + "\n"


def test_the_page_is_current() -> None:
    """`python tests/packaging/test_cli_page.py` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_command_is_there() -> None:
    assert [name for name in all_commands() if f"### `msprobe {name}`" not in page()] == []


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
