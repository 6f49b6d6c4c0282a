"""What a command of the shell gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from msprobe_engine.config.launch_scripts.shell.syntax import Assignment
from msprobe_engine.config.launch_scripts.shell.values import Place, State, Text

if TYPE_CHECKING:
    from msprobe_engine.config.launch_scripts.shell.evaluate import Evaluator

Status: TypeAlias = "bool | None"
"""How a command ends: well, not well, or None where only a run can tell."""


@dataclass(frozen=True, slots=True)
class Call:
    """A command that the reader carries out.

    Attributes:
        fields: the words, the name first.
        assignments: arguments of ``export`` and its like that are written as assignments.
    """

    evaluator: Evaluator
    state: State
    fields: list[Text]
    assignments: list[Assignment]
    at: Place


Builtin: TypeAlias = "Callable[[Call], Status]"
