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


MAX_OPTIONS = 8
"""Ways of a branch whose texts are listed."""

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
        functions: name -> (tree, file); several where it is not decided which of them it is.
        allexport: ``set -a``.
        status: of the last command; None: not known.
    """

    scopes: list[dict[str, Variable | None]]
    positional: tuple[Text, ...] | None
    name: str
    directory: str | None
    functions: dict[str, tuple[tuple[object, str], ...]] = field(default_factory=dict)
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


def merge(own: State, other: State, why: str, place: Place) -> State:
    """The state behind two ways of which one was gone: what differs is not known."""
    out = own.copy()
    for i, scope in enumerate(out.scopes):
        other_scope = other.scopes[i] if i < len(other.scopes) else {}
        for name in scope.keys() | other_scope.keys():
            own_value, other_value = scope.get(name), other_scope.get(name)
            if own_value != other_value:
                scope[name] = _merge_variables(name, own_value, other_value, why, place)
    if own.positional != other.positional:
        own_words, other_words = (
            list(words) if words is not None else _not_known("$@", why, place) for words in (own.positional, other.positional)
        )
        out.positional = tuple(_merged_lists(own_words, other_words, "@", why, place))
    out.directory = own.directory if own.directory == other.directory else None
    if own.functions != other.functions:
        for name, bodies in other.functions.items():
            ours = own.functions.get(name, ())
            out.functions[name] = (*ours, *(body for body in bodies if body not in ours))
    out.status = own.status if own.status == other.status else None
    out.written = {path: text for path, text in own.written.items() if other.written.get(path) == text}
    return out


def either_text(source: str, texts: Sequence[Text], why: str, at: Place) -> Text:
    """What one of several ways gives; where they differ and are known, these are its options."""
    if all(text == texts[0] for text in texts):
        return texts[0]
    known = list(dict.fromkeys(known_text(text) for text in texts))
    few = None not in known and len(known) <= MAX_OPTIONS
    return (Unknown(source, why, at, options=tuple((text or "",) for text in known) if few else ()),)


def _merge_variables(name: str, own: Variable | None, other: Variable | None, why: str, place: Place) -> Variable:
    like = own or other or Variable()
    exported = bool((own and own.exported) or (other and other.exported))
    if (own and own.items is not None) or (other and other.items is not None):
        own_items, other_items = _elements(own), _elements(other)
        items = dict(enumerate(_merged_lists(own_items, other_items, name, why, place)))
        return replace(like, text=None, items=items, exported=exported, associative=False)  # type: ignore[arg-type]
    own_text, other_text = (own.text if own else None), (other.text if other else None)
    return replace(like, text=_merged_texts(name, own_text, other_text, why, place), exported=exported)


def _not_known(source: str, why: str, at: Place) -> list[Text]:
    return [(Unknown(source, why, at, many=True),)]


def _elements(variable: Variable | None) -> list[Text]:
    if variable is None:
        return []
    if variable.items is None:
        return [variable.text] if variable.text is not None else []
    return list(variable.items.values())


def _common(own: list[Text], other: list[Text]) -> tuple[int, int]:
    """How many elements are equal at the beginning and at the end."""
    shorter = min(len(own), len(other))
    head = next((i for i in range(shorter) if own[i] != other[i]), shorter)
    tail = next((i for i in range(shorter - head) if own[-1 - i] != other[-1 - i]), shorter - head)
    return head, tail


def _merged_lists(own: list[Text], other: list[Text], name: str, why: str, place: Place) -> list[Text]:
    head, tail = _common(own, other)
    if head == len(own) == len(other):
        return own
    middle = [tuple(show_text(text) for text in side[head : len(side) - tail]) for side in (own, other)]
    between = Unknown(f"${name}", why, place, many=True, options=(middle[0], middle[1]))
    return [*own[:head], (between,), *(own[len(own) - tail :] if tail else [])]


def _merged_texts(name: str, own: Text | None, other: Text | None, why: str, place: Place) -> Text:
    """Texts that are lists of words keep the words both have."""
    own_text, other_text = (known_text(text) if text is not None else "" for text in (own, other))
    source = f"${name}"
    if own_text is None or other_text is None:
        return (Unknown(source, why, place),)
    words = [side.split() for side in (own_text, other_text)]
    if max(map(len, words)) < 2:
        return (Unknown(source, why, place, options=((own_text,), (other_text,))),)
    lists = [[(Known(word, place),) for word in side] for side in words]
    head, tail = _common(lists[0], lists[1])  # type: ignore[arg-type]
    rest = [side[head : len(side) - tail] for side in words]
    between = Unknown(source, why, place, many=True, options=(tuple(rest[0]), tuple(rest[1])))
    before, after = " ".join(words[0][:head]), " ".join(words[0][len(words[0]) - tail :] if tail else [])
    out: list[Piece] = [Known(before + " ", place)] if before else []
    return (*out, between, *([Known(" " + after, place)] if after else []))
