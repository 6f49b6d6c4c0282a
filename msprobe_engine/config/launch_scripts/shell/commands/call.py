"""What a command of the shell gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from msprobe_engine.config.launch_scripts.shell.control import Control
from msprobe_engine.config.launch_scripts.shell.syntax import Assignment
from msprobe_engine.config.launch_scripts.shell.values import Place, State, Status, Text


@dataclass(frozen=True, slots=True)
class Call:
    """A command that the reader carries out.

    Attributes:
        fields: the words, the name first.
        assignments: arguments of ``export`` and its like that are written as assignments.
    """

    evaluator: Control
    state: State
    fields: list[Text]
    assignments: list[Assignment]
    at: Place


Builtin: TypeAlias = "Callable[[Call], Status]"
