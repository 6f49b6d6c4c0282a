"""The tree of a shell script: words made of parts, commands made of words. `words` and `grammar` build it, `evaluate` walks it."""

from __future__ import annotations

from dataclasses import dataclass, field


class ShellSyntaxError(Exception):
    """The text is no shell script that this reader understands.

    Args:
        line: where, counted from 1.
    """

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {what}")
        self.line = line
        self.what = what


@dataclass(frozen=True, slots=True)
class Literal:
    """Text as it stands; `quoted` text is not split, is no pattern and no reserved word."""

    text: str
    line: int
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """``$NAME``, ``${NAME...}``.

    Attributes:
        name: variable, digit or special character.
        index: between brackets (``@`` and ``*`` are literal words), else None.
        prefix: ``#`` for the length, ``!`` for the variable named by the value or the keys of an array, else empty.
        operator: ``:-``, ``%%``, ``/``, ...; ``:`` is a substring; empty: none.
        arguments: the words behind the operator.
        source: as written.
    """

    name: str
    line: int
    quoted: bool
    source: str
    index: Word | None = None
    prefix: str = ""
    operator: str = ""
    arguments: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Substitution:
    """``$(...)`` or backquotes: its commands, never run."""

    body: CommandList
    line: int
    quoted: bool
    source: str


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """``$((...))``; the word is the expression before its own expansions."""

    expression: Word
    line: int
    quoted: bool
    source: str


@dataclass(frozen=True, slots=True)
class ProcessFile:
    """``<(...)`` or ``>(...)``: a file that only a run has."""

    line: int
    source: str
    quoted: bool = True


Part = Literal | Parameter | Substitution | Arithmetic | ProcessFile


@dataclass(frozen=True, slots=True)
class Word:
    """One word before its expansions."""

    parts: tuple[Part, ...]
    line: int

    def plain(self) -> str | None:
        """The text when nothing in the word is quoted or expanded; reserved words and operators of tests are such words."""
        if all(isinstance(part, Literal) and not part.quoted for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, Literal))
        return None


@dataclass(frozen=True, slots=True)
class Assignment:
    """``NAME=value``, ``NAME+=value``, ``NAME[index]=value``; with `items` an array: pairs of index (or None) and word."""

    name: str
    line: int
    value: Word | None = None
    append: bool = False
    index: Word | None = None
    items: tuple[tuple[Word | None, Word], ...] | None = None


@dataclass(slots=True)
class Redirection:
    """``>``, ``<<``, ... with its target; the body of a here-document is put into `target` when its lines are reached."""

    operator: str
    descriptor: str
    target: Word
    line: int


@dataclass(frozen=True, slots=True)
class Simple:
    """Assignments, words and redirections. Arguments of ``export`` and its like may be assignments among the words."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word | Assignment, ...]
    redirections: tuple[Redirection, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    commands: tuple[Command, ...]
    negated: bool
    line: int


@dataclass(frozen=True, slots=True)
class AndOr:
    """``first && second``, ``first || second``."""

    first: Command
    operator: str
    second: Command
    line: int


@dataclass(frozen=True, slots=True)
class CommandList:
    """Commands one after another; `background` has the positions of those followed by ``&``."""

    commands: tuple[Command, ...]
    line: int
    background: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Group:
    """``{ ...; }``, or with `subshell` ``( ... )``."""

    body: CommandList
    subshell: bool
    line: int
    redirections: tuple[Redirection, ...] = ()


@dataclass(frozen=True, slots=True)
class If:
    branches: tuple[tuple[CommandList, CommandList], ...]
    otherwise: CommandList | None
    line: int


@dataclass(frozen=True, slots=True)
class While:
    condition: CommandList
    body: CommandList
    until: bool
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """``for name in words``; `words` None stands for ``"$@"``."""

    name: str
    words: tuple[Word, ...] | None
    body: CommandList
    line: int


@dataclass(frozen=True, slots=True)
class CountingFor:
    """``for ((start; check; step))``."""

    start: Word
    check: Word
    step: Word
    body: CommandList
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    """Branches are patterns, body and how it ends (``;;``, ``;&``, ``;;&``)."""

    subject: Word
    branches: tuple[tuple[tuple[Word, ...], CommandList, str], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    body: Command
    line: int


@dataclass(frozen=True, slots=True)
class Test:
    """``[[ ... ]]``: words and operators of it in order (``&&``, ``||``, ``(``, ``)``, ``<``, ``>``, ``!`` are text)."""

    items: tuple[Word | str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Calculation:
    """``(( ... ))`` as a command."""

    expression: Word
    line: int


Command = Simple | Pipeline | AndOr | CommandList | Group | If | While | For | CountingFor | Case | Function | Test | Calculation


@dataclass(slots=True)
class PendingHereDocument:
    """A here-document whose lines have not been reached yet."""

    redirection: Redirection
    delimiter: str
    quoted: bool
    strip_tabs: bool
    line: int = field(default=0)
