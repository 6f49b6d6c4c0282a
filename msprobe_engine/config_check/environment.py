"""Variables of the environment as they may be written: without secrets, and without what differs in every shell and says nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from msprobe_engine.config_check.secrets import HIDDEN, masked, secret_variable
from msprobe_engine.core.processes import OWNER

LONGEST = 32768
"""Characters of one value; longer ones are cut, with a note of their length."""
_NOISE = frozenset((OWNER, "_", "LS_COLORS", "LESSOPEN", "LESSCLOSE", "PS1", "PS2", "PROMPT_COMMAND", "TERMCAP"))


class Environment(NamedTuple):
    """What is collected.

    Attributes:
        left_out: names of variables that are not in `values` because their name says that they are secrets.
        hidden: names of variables that had a secret somewhere in their value, which is masked.
    """

    values: dict[str, str]
    left_out: tuple[str, ...]
    hidden: tuple[str, ...]


def collect(environ: Mapping[str, str] | None = None) -> Environment:
    """The environment of this process (or `environ`), sorted by name."""
    values: dict[str, str] = {}
    left_out: list[str] = []
    hidden: list[str] = []
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if secret_variable(name):
            left_out.append(name)
            continue
        if name in _NOISE or name.startswith("BASH_FUNC_"):  # functions of a shell, not settings
            continue
        shown = masked(value)
        if shown != value:
            hidden.append(name)
            if HIDDEN in shown:
                shown = HIDDEN
        values[name] = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}... ({len(shown)} characters)"
    return Environment(values, tuple(left_out), tuple(hidden))
