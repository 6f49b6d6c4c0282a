"""What reading launch scripts and settings files without running them gives: values, each with the place where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SOURCES = ("flag", "launcher", "override", "sbatch", "shell", "python", "yaml", "json", "toml", "hostfile", "log")
"""Where a value can stand: an option of the program, an option of its launcher, ``key=value`` behind the program (Hydra), an ``#SBATCH``
line, a file of that kind."""


@dataclass(frozen=True, slots=True)
class Found:
    """One value and where it stands.

    Attributes:
        value: of a command line: the text as the program gets it, ``True`` for an option without a value, a list of texts for one with
            several. Of a file: the plain data (number, text, bool, None, a list of such).
        where: one of `SOURCES`.
        file: the file it stands in, as it was reached from the given path.
        line: the line there, counted from 1; 0 when the format has no lines.
        known: False where the value depends on what only a run knows; ``value`` is then the text of the script.
        why: for a value that is not known, what it depends on, one sentence; for one that is known only under a condition, the condition.
    """

    value: Any
    where: str
    file: str
    line: int = 0
    known: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """One command that starts a training, as the shell would start it.

    Attributes:
        launcher: ``torchrun``, ``deepspeed``, ``accelerate``, ``msrun``, ``srun``, ``mpirun``, ``python``: the innermost that starts ranks.
        program: the script or module that is trained with.
        argv: the whole command, word by word; what is not known stands as in the script.
        env: variables of its environment that the script sets.
        file, line: where the command stands.
        condition: what has to hold for the command to run, when that cannot be decided; empty: it runs.
    """

    launcher: str
    program: str
    argv: tuple[str, ...]
    env: dict[str, str]
    file: str
    line: int
    condition: str = ""


@dataclass(slots=True)
class StaticSettings:
    """All that was found in the given files and those they name.

    Attributes:
        values: option or dotted key -> value, in the order of the files. Options keep their spelling without the leading dashes.
        conflicts: keys to which several commands or files give different values -> all of them (value None: a command of the same program
            does not give it); ``values`` has the first. Such a key is like the same values only, see `normalize.Several`.
        env: variables that the scripts set for the training (exported, or before the command); secrets are left out and counted in `notes`.
        env_found: the same with their places.
        launches: the commands that start a training.
        files: every file that was read.
        notes: what could not be decided or was passed over, one sentence each, with file and line.
    """

    values: dict[str, Found] = field(default_factory=dict)
    conflicts: dict[str, list[Found]] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    env_found: dict[str, Found] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def existing_shape(self) -> dict[str, Any]:
        """The content of ``hyperparameters_static.json`` as the existing tool has it: a flat mapping (spec A.5.3).

        Options without a value are ``True``, null is left out, a key with several values is
        ``{"description": "duplicate_value", "values": [...]}``. What is not known stands as in the script.
        """
        shape: dict[str, Any] = {}
        for key, setting in self.values.items():
            if setting.value is None:
                continue
            if key in self.conflicts:
                values: list[Any] = []
                for other in self.conflicts[key]:
                    if other.value is not None and other.value not in values:
                        values.append(other.value)
                shape[key] = {"description": "duplicate_value", "values": values} if len(values) > 1 else setting.value
            else:
                shape[key] = setting.value
        return shape
