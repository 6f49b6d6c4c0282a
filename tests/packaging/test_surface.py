"""What users type is frozen: settings keys and command-line flags change only on purpose."""

from __future__ import annotations

import argparse
from pathlib import Path

from msprobe_engine.cli.main import ALIASES, _top_parser, all_commands, sub_parser
from msprobe_engine.core.settings.document import key_paths

PINNED = Path(__file__).with_name("surface.txt")


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [" ".join(action.option_strings) or f"<{action.dest}>" for action in parser._actions]


def surface() -> str:
    """All settings keys and flags, one per line."""
    lines = [f"settings {path}" for path in key_paths()]
    lines += [f"msprobe {flag}" for flag in _flags(_top_parser())]
    lines += [f"msprobe {name} {flag}" for name in all_commands() for flag in _flags(sub_parser(name))]
    lines += [f"msprobe {alias} = {name}" for alias, name in sorted(ALIASES.items())]
    return "\n".join(lines) + "\n"


def test_settings_keys_and_flags_are_the_pinned_ones() -> None:
    """A changed surface fails here: `python tests/packaging/test_surface.py` writes the new one, and CHANGELOG.md tells of it."""
    assert surface() == PINNED.read_text(encoding="utf-8")


if __name__ == "__main__":
    PINNED.write_text(surface(), encoding="utf-8")
