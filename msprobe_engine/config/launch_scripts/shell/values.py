"""Values of shell variables, with what is not known in them, and the state of a shell that can be copied and merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

Status: TypeAlias = "bool | None"
"""How a command ends: well, not well, or None where only a run can tell."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Known:
    """Text, and where it was written (which says nothing about equality)."""

    text: str
    at: Place = field(compare=False)


@dataclass(frozen=True, slots=True)
class Unknown:
    """What only a run knows.

    Attributes:
        source: as in the script.
        why: what it depends on, a phrase.
        many: it may be any number of words.
        absent: it is a variable or argument that nothing in the script sets: tests take it as empty, and that is said.
        options: where it is one of a few texts, these as lists of words; empty: not known.
    """

    source: str
    why: str
    at: Place = field(compare=False)
    many: bool = False
    absent: bool = False
    options: tuple[tuple[str, ...], ...] = ()


Piece = Known | Unknown
Text = tuple[Piece, ...]
"""A text in pieces; it is known when all of them are."""


def known_text(text: Text) -> str | None:
    """The text, None when a piece is not known."""
    out = []
    for piece in text:
        if not isinstance(piece, Known):
            return None
        out.append(piece.text)
    return "".join(out)


def show_text(text: Text) -> str:
    """The text, with what is not known as it stands in the script."""
    return "".join(piece.text if isinstance(piece, Known) else piece.source for piece in text)


def certain_before(texts: Sequence[Text], index: int) -> bool:
    """None of the texts up to an index stands for an unknown number of words."""
    return not any(isinstance(piece, Unknown) and piece.many for text in texts[: index + 1] for piece in text)


def unknown_of(text: Text) -> Unknown | None:
    """The first piece that is not known."""
    return next((piece for piece in text if isinstance(piece, Unknown)), None)


def readable(text: Text) -> bool:
    """Something of the text is known, so that it can be read as a script."""
    return not text or any(isinstance(piece, Known) and piece.text.strip() for piece in text)


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable: one text, or with `items` an array (index or key -> text, in order).

    Attributes:
        associative: keys are texts, not numbers.
        integer: declared with ``-i``.
    """

    text: Text | None = None
    items: dict[int | str, Text] | None = None
    associative: bool = False
    exported: bool = False
    readonly: bool = False
    integer: bool = False

    def value(self) -> Text | None:
        """What ``$NAME`` gives; None where that is unset."""
        return self.text if self.items is None else self.items.get("0" if self.associative else 0)

    def certain(self) -> bool:
        """No element of an array stands for an unknown number of elements."""
        return self.items is None or not any(isinstance(piece, Unknown) and piece.many for text in self.items.values() for piece in text)


@dataclass(slots=True)
class State:
    """The variables and settings of one shell.

    Attributes:
        scopes: the global variables, then those of each function that runs, innermost last. None: unset there.
        positional: ``$1``, ...; a text that is an unknown number of words stands for as many of them. None: those of the script, not given.
        name: ``$0``.
        directory: working directory; None: not known.
        functions: name -> (tree, file).
        allexport: ``set -a``.
        status: of the last command; None: not known.
    """

    scopes: list[dict[str, Variable | None]]
    positional: tuple[Text, ...] | None
    name: str
    directory: str | None
    functions: dict[str, tuple[object, str]] = field(default_factory=dict)
    allexport: bool = False
    status: Status = True
    written: dict[str, Text] = field(default_factory=dict)

    def copy(self) -> State:
        """A state that can be changed without changing this one."""
        return replace(self, scopes=[dict(scope) for scope in self.scopes], functions=dict(self.functions), written=dict(self.written))

    def become(self, other: State) -> None:
        """Take over everything of another state."""
        self.scopes, self.functions, self.written = other.scopes, other.functions, other.written
        self.positional, self.directory, self.status = other.positional, other.directory, other.status
        self.allexport = other.allexport

    def write(self, path: str, append: bool, text: Text) -> None:
        """Note what the script writes into a file; it may be a settings file that the training reads."""
        before = self.written.get(path, ()) if append else ()
        self.written = {**self.written, path: (*before, *text)}

    def lookup(self, name: str) -> Variable | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def value_of(self, name: str) -> Text | None:
        """What the script gives ``$NAME``; None where it is not set."""
        variable = self.lookup(name)
        return None if variable is None else variable.value()

    def is_set_in_script(self, name: str) -> bool:
        """The script says something of it, be it ``unset``."""
        return any(name in scope for scope in self.scopes)

    def set_variable(self, name: str, variable: Variable | None) -> None:
        """Set where it is visible, else globally."""
        for scope in reversed(self.scopes):
            if name in scope:
                scope[name] = variable
                return
        self.scopes[0][name] = variable

    def names(self) -> set[str]:
        return {name for scope in self.scopes for name in scope}

    def exported_variables(self) -> dict[str, Text]:
        """The environment of a command, as far as the script says it."""
        out: dict[str, Text] = {}
        for scope in self.scopes:
            for name, variable in scope.items():
                value = variable.value() if variable is not None and variable.exported and variable.items is None else None
                if value is not None:
                    out[name] = value
                else:
                    out.pop(name, None)
        return out


def merge(first: State, second: State, why: str, at: Place) -> State:
    """The state behind two ways of which one was gone: what differs is not known."""
    out = first.copy()
    for i, scope in enumerate(out.scopes):
        other = second.scopes[i] if i < len(second.scopes) else {}
        for name in scope.keys() | other.keys():
            a, b = scope.get(name), other.get(name)
            if a != b:
                scope[name] = _merge_variables(name, a, b, why, at)
    if first.positional != second.positional:
        left, right = (list(one) if one is not None else _not_known("$@", why, at) for one in (first.positional, second.positional))
        out.positional = tuple(_merged_lists(left, right, "@", why, at))
    out.directory = first.directory if first.directory == second.directory else None
    out.functions = {**second.functions, **first.functions}
    out.status = first.status if first.status == second.status else None
    out.written = {path: text for path, text in first.written.items() if second.written.get(path) == text}
    return out


def _merge_variables(name: str, a: Variable | None, b: Variable | None, why: str, at: Place) -> Variable:
    like = a or b or Variable()
    exported = bool((a and a.exported) or (b and b.exported))
    if (a and a.items is not None) or (b and b.items is not None):
        left, right = _elements(a), _elements(b)
        items = dict(enumerate(_merged_lists(left, right, name, why, at)))
        return replace(like, text=None, items=items, exported=exported, associative=False)  # type: ignore[arg-type]
    left_text, right_text = (a.text if a else None), (b.text if b else None)
    return replace(like, text=_merged_texts(name, left_text, right_text, why, at), exported=exported)


def _not_known(source: str, why: str, at: Place) -> list[Text]:
    return [(Unknown(source, why, at, many=True),)]


def _elements(variable: Variable | None) -> list[Text]:
    if variable is None:
        return []
    if variable.items is None:
        return [variable.text] if variable.text is not None else []
    return list(variable.items.values())


def _common(a: list[Text], b: list[Text]) -> tuple[int, int]:
    """How many elements are equal at the beginning and at the end."""
    shorter = min(len(a), len(b))
    head = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    tail = next((i for i in range(shorter - head) if a[-1 - i] != b[-1 - i]), shorter - head)
    return head, tail


def _merged_lists(a: list[Text], b: list[Text], name: str, why: str, at: Place) -> list[Text]:
    head, tail = _common(a, b)
    if head == len(a) == len(b):
        return a
    middle = [tuple(show_text(text) for text in side[head : len(side) - tail]) for side in (a, b)]
    between = Unknown(f"${name}", why, at, many=True, options=(middle[0], middle[1]))
    return [*a[:head], (between,), *(a[len(a) - tail :] if tail else [])]


def _merged_texts(name: str, a: Text | None, b: Text | None, why: str, at: Place) -> Text:
    """Texts that are lists of words keep the words both have."""
    left, right = (known_text(text) if text is not None else "" for text in (a, b))
    source = f"${name}"
    if left is None or right is None:
        return (Unknown(source, why, at),)
    words = [side.split() for side in (left, right)]
    if max(map(len, words)) < 2:
        return (Unknown(source, why, at, options=((left,), (right,))),)
    lists = [[(Known(word, at),) for word in side] for side in words]
    head, tail = _common(lists[0], lists[1])  # type: ignore[arg-type]
    rest = [side[head : len(side) - tail] for side in words]
    between = Unknown(source, why, at, many=True, options=(tuple(rest[0]), tuple(rest[1])))
    before, after = " ".join(words[0][:head]), " ".join(words[0][len(words[0]) - tail :] if tail else [])
    out: list[Piece] = [Known(before + " ", at)] if before else []
    return (*out, between, *([Known(" " + after, at)] if after else []))
