"""docs/reference/cli.md lists every command with its options, as the parsers have them."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from msprobe_engine.cli.main import ALIASES, COMMANDS, SECTIONS, all_commands, sub_parser

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
INTRODUCTION = """\
# Commands

`msprobe help COMMAND` prints all of this with examples. RUN is an output directory or a part of it, GOLDEN the same of a run that is right.
`--debug` shows the traceback of an error. Exit codes are the same everywhere, but `msprobe run` ends with that of the launch line:

| code | means |
| --- | --- |
| 0 | nothing was found, or done |
| 1 | something was found, or does not fit |
| 2 | wrong usage, settings or input, or nothing to read |
| 3 | nothing was found, but not everything could be read or compared |
| 4 | a bug in msprobe: run again with `--debug` and report it |
| 130 | interrupted |

This page is made from the code: `python tests/packaging/test_cli_page.py`.
"""
MANY = 3
"""Commands that have an option in the same words, for it to be explained once."""


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("%%", "%").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    value = "" if action.nargs == 0 or not action.option_strings else f" {action.metavar or action.dest.upper()}"
    help = _text(parser._get_formatter()._expand_help(action))
    choices = [str(choice) for choice in action.choices or ()]
    named = all(choice in help for choice in choices)
    return f"* `{name}{value}`: {help}" + ("" if named else f" ({', '.join(choices)})")


def _options(name: str) -> list[str]:
    parser = sub_parser(name)
    shown = [action for action in parser._actions if action.dest not in ("help", "debug") and action.help != argparse.SUPPRESS]
    return [_option(parser, action) for action in shown]


def _names(options: list[str]) -> str:
    return ", ".join(f"`{option.split('`')[1].split()[0].rstrip(',')}`" for option in options)


def page() -> str:
    """The page, in the order of ``msprobe --help``. An option that many commands have in the same words is explained once."""
    titles = {first: title for title, first in SECTIONS.items()}
    other_names = {name: sorted(alias for alias, target in ALIASES.items() if target == name) for name in all_commands()}
    counts = Counter(option for name in all_commands() for option in _options(name))
    common = [option for option, count in counts.items() if count >= MANY]
    answers = next(option for option, _ in counts.most_common() if option.startswith("* `--json`"))
    without = [name for name in all_commands() if not any(option.startswith("* `--json") for option in _options(name))]
    first_of = dict.fromkeys(common, "")
    parts = [INTRODUCTION, "Options of several commands:\n\n" + "\n".join(common) + "\n"]
    parts[-1] = parts[-1].replace("`--json`:", f"`--json` (of all commands but {', '.join(without)}):", 1)
    for first, command in COMMANDS.items():
        if first in titles:
            parts.append(f"## {titles[first]}\n")
        for name in (each for each in all_commands() if each == first or each.startswith(f"{first} ")):
            said = _text(command.help if name == first else sub_parser(name).description).rstrip(".")
            said = said[:1].upper() + said[1:].partition(". ")[0]  # `msprobe help` has the rest
            also = f" Also called {', '.join(other_names[name])}." if other_names[name] else ""
            shared: dict[str, list[str]] = {}
            own: list[str] = []
            for option in (each for each in _options(name) if each != answers):
                place = first_of.setdefault(option, name)
                (own if place == name else shared.setdefault(place, [])).append(option)
            own += [f"* as {f'`msprobe {place}`' if place else 'above'}: {_names(options)}" for place, options in shared.items()]
            parts.append(f"### `msprobe {name}`\n\n{said}.{also}\n" + ("\n" + "\n".join(own) + "\n" if own else ""))
    return "\n".join(parts).rstrip() + "\n"


def test_the_page_is_current() -> None:
    """`python tests/packaging/test_cli_page.py` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_command_is_there() -> None:
    made = page()
    assert [name for name in all_commands() if f"### `msprobe {name}`" not in made] == []


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
