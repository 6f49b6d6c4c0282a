"""What the reading of one script and all it leads to shares: limits, notes, and the commands it would start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from msprobe_engine.config.launch_scripts.shell.values import Place, Text, Unknown
from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.words import shorten_text

MAX_COMMANDS = 50_000
MAX_CHARACTERS = 4_000_000
MAX_STARTED = 2_000
MAX_NOTES = 200
NOT_SET = "taken as not set"
"""In the note on variables and arguments that a script uses and does not set."""
MAX_NESTED = 45
"""How deep commands, functions and scripts may stand inside each other together."""

# fmt: off
ONLY_A_RUN_KNOWS = frozenset({
    "HOME", "USER", "LOGNAME", "HOSTNAME", "PWD", "OLDPWD", "PATH", "SHELL", "UID", "EUID", "PPID", "BASHPID", "RANDOM", "SRANDOM",
    "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "OSTYPE", "MACHTYPE", "HOSTTYPE", "BASH", "BASH_VERSION", "BASH_VERSINFO", "SHLVL",
    "TERM", "LANG", "TMPDIR", "DIRSTACK", "PIPESTATUS", "REPLY", "FUNCNAME", "BASH_REMATCH", "SLURM_JOB_ID", "SLURM_JOBID",
    "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_SUBMIT_DIR",
})
# fmt: on
"""Variables that are there although no script sets them, so nothing can be taken as their value."""


class Exhausted(Exception):
    """The script asks for more work than a launch script needs."""


@dataclass(frozen=True, slots=True)
class Started:
    """A command that is no part of the shell, as the script would start it.

    Attributes:
        env: its environment, as far as the script sets it.
        condition: what is not decided and has to hold; empty: nothing.
        directory: its working directory; None: not known.
        written: files that the script wrote before, path -> content.
        captured: its output becomes a value of the script, so it is no training.
        outer: the commands that start it through a shell (``srun ... bash -c``), outermost first.
    """

    argv: tuple[Text, ...]
    env: dict[str, Text]
    at: Place
    condition: str
    directory: str | None
    written: dict[str, Text]
    captured: bool
    outer: tuple[tuple[Text, ...], ...] = ()


@dataclass(slots=True)
class Context:
    """Shared by all shells of one reading.

    Attributes:
        environment: the variables at the start; None: not known.
        given: variables that something outside the script sets: the environment it is read in, as far as it may be shown, and what
            ``#SBATCH`` lines ask for. Others may be set too.
        inherits: `given` has an environment.
        pasted: the pieces that stand as marks in texts that are read as scripts.
        edited: texts and what an expansion (``${A^^}``) or a filter (``tr``) made of them, in the order of evaluation: a secret that was
            edited is one still, and cannot be found by its former text.
        conditions: the undecided conditions that the command being read stands under.
    """

    environment: Mapping[str, str] | None = None
    given: dict[str, str] = field(default_factory=dict)
    inherits: bool = False
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    pasted: list[Unknown] = field(default_factory=list)
    edited: dict[tuple[str, str], None] = field(default_factory=dict)
    nested: int = 0
    capturing: int = 0
    _assumed: dict[str, Place] = field(default_factory=dict)
    _noted: set[str] = field(default_factory=set)
    _commands: int = 0
    _characters: int = 0

    def add_note(self, at: Place, text: str) -> None:
        """Say something about a line, once."""
        line = one_line(f"{at.file}, line {at.line}: {text}")
        if line not in self._noted and len(self._noted) <= MAX_NOTES:
            self._noted.add(line)
            if len(self._noted) > MAX_NOTES:
                line = f"{at.file}: more than {MAX_NOTES} remarks; the rest is left out"
            self.notes.append(line)

    def assume_absent(self, unknown: Unknown) -> None:
        """A variable or argument that the script does not set is taken as not set at all; `finish` says it."""
        match = re.match(r"\$?\{?[!#]?(\w+|[@*#])", unknown.source)
        name = match[1] if match else unknown.source
        self._assumed.setdefault("arguments" if name[0] in "0123456789@*#" else name, unknown.at)

    def finish(self) -> None:
        """Say what was taken as not set, in one note per file."""
        files: dict[str, list[str]] = {}
        for name, at in self._assumed.items():
            files.setdefault(at.file, []).append(f"{name} (line {at.line})")
        for file, names in files.items():
            self.notes.append(one_line(f"{file}: {NOT_SET}, because {self._outside(names)}: {', '.join(names)}"))

    def _outside(self, names: list[str]) -> str:
        if self.environment is None and not self.inherits:
            return "no environment and no arguments are given"
        arguments = [name for name in names if name.startswith("arguments ")]
        return " and ".join(
            [
                *(["they are not in the environment"] if len(arguments) < len(names) else []),
                *(["no arguments are given"] if arguments else []),
            ]
        )

    def paste(self, text: Text) -> str:
        """A text as a script of its own; what is not known in it stands as a mark (`words.PASTED`) and is not known there either."""
        out = []
        for piece in text:
            if isinstance(piece, Unknown):
                self.pasted.append(piece)
                out.append(f"\ue000{len(self.pasted) - 1}\ue001")
            else:
                out.append(piece.text)
        return "".join(out)

    def note_edit(self, before: str, after: str) -> None:
        """An expansion or a filter made `after` of `before`."""
        if after.strip() != before.strip():
            self.edited.setdefault((before.strip(), after.strip()))

    def spend(self, characters: int = 0) -> None:
        """One command or expansion more.

        Raises:
            Exhausted: that was too many.
        """
        self._commands += 1
        self._characters += characters
        if self._commands > MAX_COMMANDS:
            raise Exhausted(f"more than {MAX_COMMANDS} commands and expansions")
        if self._characters > MAX_CHARACTERS:
            raise Exhausted(f"more than {MAX_CHARACTERS} characters of expanded text")

    def deeper(self) -> None:
        """One level down; `nested` goes up again with ``-= 1``."""
        self.nested += 1
        if self.nested > MAX_NESTED:
            raise Exhausted(f"commands, functions and scripts inside each other more than {MAX_NESTED} deep")

    def start(self, started: Started) -> None:
        if len(self.started) >= MAX_STARTED:
            raise Exhausted(f"more than {MAX_STARTED} commands are started")
        self.started.append(started)


def short(source: str) -> str:
    """A piece of a script for a message: one line, at most 80 characters."""
    return shorten_text(" ".join(source.split()), 80)
