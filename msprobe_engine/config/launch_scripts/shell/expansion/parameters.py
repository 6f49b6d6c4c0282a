"""Expansion of parameters: ``$NAME``, ``${NAME[@]}``, ``${NAME:-default}``, ``${NAME%pattern}`` and the others."""

from __future__ import annotations

from dataclasses import replace

from msprobe_engine.config.launch_scripts.shell.context import ONLY_A_RUN_KNOWS, Context, short
from msprobe_engine.config.launch_scripts.shell.expansion import arithmetic, patterns
from msprobe_engine.config.launch_scripts.shell.syntax import Literal, Parameter, Word
from msprobe_engine.config.launch_scripts.shell.values import (
    Known,
    Piece,
    Place,
    State,
    Text,
    Unknown,
    Variable,
    certain_before,
    known_text,
    show_text,
    unknown_of,
)
from msprobe_engine.config.launch_scripts.shell.words import PASTED

Segment = tuple[Piece, bool] | None
"""A piece and whether it is split into words; None: a field ends here."""


class NotKnown(Exception):
    """Arithmetic needs a value that only a run knows."""

    def __init__(self, unknown: Unknown) -> None:
        super().__init__(unknown.source)
        self.unknown = unknown


class Parameters:
    """What parameters stand for in a state. `expand.Expander` has the rest of what words are made of.

    Attributes:
        file: the script that is read.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.file = ""

    def place(self, line: int) -> Place:
        return Place(self.file, line)

    def text(self, word: Word, state: State) -> Text:
        """One text, not split."""
        raise NotImplementedError

    def pattern(self, word: Word, state: State) -> list[tuple[str, bool]] | None:
        """The word as pattern."""
        raise NotImplementedError

    def number(self, expression: Word, state: State) -> int:
        """The value of an arithmetic expression."""
        raise NotImplementedError

    def segments(self, word: Word, state: State) -> list[Segment]:
        """The pieces of a word, not split yet."""
        raise NotImplementedError

    def assume_text(self, text: Text) -> str | None:
        """The text for a test: variables that nothing sets are empty there, which is said."""
        out = []
        for piece in text:
            if isinstance(piece, Known):
                out.append(piece.text)
            elif piece.absent:
                self.context.assume_absent(piece)
            else:
                return None
        return "".join(out)

    def of_name(self, name: str, state: State, place: Place, source: str) -> Text | None:
        """What ``$NAME`` gives; None: unset for sure."""
        if name == "BASH_SOURCE":
            return (Known(self.file, place),)
        if name == "LINENO":
            return (Known(str(place.line), place),)
        variable = state.lookup(name)
        if variable is not None and not (variable.exported and variable.text is None and variable.items is None):
            return variable.value()
        if variable is None and state.is_set_in_script(name):
            return None
        if name in self.context.given:
            return (Known(self.context.given[name], place),)
        if self.context.environment is not None and name not in ONLY_A_RUN_KNOWS:
            return None
        if name == "PWD" and state.directory is not None:
            return (Known(state.directory, place),)
        if name in ONLY_A_RUN_KNOWS:
            return (Unknown(source, "is known only where the script runs", place),)
        return (Unknown(source, "is not set in the script", place, absent=True),)

    def _special(self, part: Parameter, state: State) -> Text | None:
        place, name = self.place(part.line), part.name
        if name.isdigit():
            if name == "0":
                return (Known(state.name, place),)
            if state.positional is None:
                return (Unknown(part.source, "is an argument of the script, which is not given", place, absent=True),)
            number = int(name[:9])
            if not certain_before(state.positional, number - 1):
                return (Unknown(part.source, "is an argument that is not known", place),)
            return state.positional[number - 1] if number <= len(state.positional) else None
        if name == "#":
            if state.positional is None:
                self.context.assume_absent(Unknown("$#", "is the number of the script's arguments, which are not given", place))
                return (Known("0", place),)
            if not certain_before(state.positional, len(state.positional)):
                return (Unknown(part.source, "is the number of arguments that are not known", place),)
            return (Known(str(len(state.positional)), place),)
        if name == "?" and state.status:
            return (Known("0", place),)
        return (Unknown(part.source, "is known only where the script runs", place),)

    def _elements(self, part: Parameter, state: State) -> list[Text] | None:
        """The list that ``$@`` or ``${NAME[@]}`` stands for; None: it is no list."""
        place = self.place(part.line)
        if part.name in ("@", "*"):
            if state.positional is None:
                return [
                    (Unknown(part.source, "stands for the arguments of the script, which are not given", place, many=True, absent=True),)
                ]
            return list(state.positional)
        if part.index is None or part.index.plain() not in ("@", "*"):
            return None
        variable = state.lookup(part.name)
        if variable is None:
            text = self.of_name(part.name, state, place, part.source)
            return [] if text is None or part.name in state.names() else [tuple(_many(piece) for piece in text)]
        if variable.items is None:
            text = variable.text
            if text is not None and unknown_of(text) is not None:  # it may be unset on one of two ways, and is no element then
                return [tuple(_many(piece) for piece in text)]
            return [] if text is None else [(Known("0", place),) if part.prefix == "!" else text]
        if part.prefix == "!":
            return [(Known(str(key), place),) for key in variable.items]
        if variable.associative:
            return list(variable.items.values())
        return [variable.items[key] for key in sorted(variable.items, key=_order)]

    def _scalar(self, part: Parameter, state: State) -> Text | None:
        place = self.place(part.line)
        if match := PASTED.fullmatch(part.name):
            number = int(match[1])
            return (self.context.pasted[number],) if number < len(self.context.pasted) else (Known(part.name, place),)
        if not (part.name[0].isalpha() or part.name[0] == "_"):
            return self._special(part, state)
        if part.index is None:
            return self.of_name(part.name, state, place, part.source)
        variable = state.lookup(part.name)
        if variable is None or part.name == "BASH_SOURCE":
            return self.of_name(part.name, state, place, part.source)
        return self.element(variable, part.index, state, part.source)

    def key(self, variable: Variable, index: Word, state: State) -> int | str | None:
        """The index of an element; None where it is not known."""
        if variable.associative:
            return known_text(self.text(index, state))
        try:
            number = self.number(index, state)
        except (NotKnown, arithmetic.SumError):
            return None
        if number < 0 and variable.items:
            number += max(key for key in variable.items if isinstance(key, int)) + 1
        return number

    def element(self, variable: Variable, index: Word, state: State, source: str) -> Text | None:
        at = self.place(index.line)
        items: dict[int | str, Text] = {} if variable.text is None else {0: variable.text}
        items = items if variable.items is None else variable.items
        key = self.key(variable, index, state)
        if key is None or not variable.certain():
            return (Unknown(short(source), "is an element that is not known", at),)
        return items.get(key)

    def parameter(self, part: Parameter, state: State) -> list[Segment]:
        """``${...}`` with its operator."""
        place = self.place(part.line)
        if part.prefix == "!" and part.index is None and part.operator != "names":
            target = self._scalar(replace(part, prefix=""), state)
            name = known_text(target) if target is not None else ""
            if not name or not name.isidentifier():
                return [(Unknown(short(part.source), "names a variable that is not known", place), not part.quoted)]
            part = replace(part, name=name, prefix="")
        if part.operator == "names":
            return [(Unknown(short(part.source), "lists variables, which are not all known", place, many=True), not part.quoted)]
        listed = self._elements(part, state)
        if part.prefix == "#":
            return [(self._length(part, state, listed), not part.quoted)]
        operator = part.operator
        if operator and operator[-1] in "-=?+" and operator[0] in ":-=?+":
            return self._alternative(part, state, listed)
        if listed is not None:
            variable = state.lookup(part.name)
            if operator == ":" and (part.name in ("@", "*") or (variable is not None and variable.items is not None)):
                listed = self._slice(part, state, listed)
            elif operator:
                listed = [self._edit_text(part, text, state) for text in listed]
            return self._expand_list(part, listed, state)
        text = self._scalar(part, state)
        if text is None:
            return [(Known("", place), False)] if part.quoted else []
        if operator:
            text = self._edit_text(part, text, state)
        if part.quoted and not text:
            return [(Known("", place), False)]
        return [(piece, not part.quoted) for piece in text]

    def _expand_list(self, part: Parameter, listed: list[Text], state: State) -> list[Segment]:
        at = self.place(part.line)
        star = joins(part)
        out: list[Segment] = []
        for i, text in enumerate(listed):
            if i:
                out.append((self.joint(state, at), False) if star and part.quoted else None)
            if part.quoted and not text:
                out.append((Known("", at), False))
            out.extend((piece, not part.quoted) for piece in text)
        return [(Known("", at), False)] if star and part.quoted and not out else out

    def joint(self, state: State, at: Place) -> Piece:
        """What ``"$*"`` puts between elements: the first character of ``IFS``, a space where it is not set."""
        value = state.value_of("IFS")
        separators = " " if value is None else known_text(value)
        return Unknown("IFS", "is not known, and joins the elements", at) if separators is None else Known(separators[:1], at)

    def _length(self, part: Parameter, state: State, listed: list[Text] | None) -> Piece:
        at = self.place(part.line)
        if listed is not None:
            if any(isinstance(piece, Unknown) and piece.many for text in listed for piece in text):
                return Unknown(short(part.source), "counts elements that are not known", at)
            return Known(str(len(listed)), at)
        text = self._scalar(replace(part, prefix=""), state)
        value = "" if text is None else self.assume_text(text)
        return Unknown(short(part.source), "is the length of a text that is not known", at) if value is None else Known(str(len(value)), at)

    def _alternative(self, part: Parameter, state: State, listed: list[Text] | None) -> list[Segment]:
        """``:-``, ``:=``, ``:?``, ``:+`` and the same without the colon."""
        place, kind, colon = self.place(part.line), part.operator[-1], part.operator.startswith(":")
        plain = replace(part, operator="", arguments=())
        text = self._scalar(part, state) if listed is None else None
        if listed is not None:
            pieces = [piece for item in listed for piece in item]
            absent = not listed or all(isinstance(piece, Unknown) and piece.absent for piece in pieces)
            empty: bool | None = absent
        else:
            pieces = list(text or ())
            absent = text is None or (len(pieces) == 1 and isinstance(pieces[0], Unknown) and pieces[0].absent)
            empty = _empty(text)
        for piece in pieces:
            if absent and isinstance(piece, Unknown):
                self.context.assume_absent(piece)
        missing = absent or (colon and empty) if empty is not None or not colon else None
        if missing is None:
            unknown = unknown_of(text or ())
            return [
                (
                    Unknown(short(part.source), f"needs {unknown.source if unknown else part.name}, which is not known", place),
                    not part.quoted,
                )
            ]
        if kind == "+":
            return [] if missing and not part.quoted else [(Known("", place), False)] if missing else self._argument(part, state)
        if not missing:
            return self.parameter(plain, state)
        if kind == "?":
            return [(Unknown(part.source, "has to be given where the script runs", place), not part.quoted)]
        if kind == "=" and listed is None:
            self.assign(part.name, self.text(part.arguments[0], state), state)
            return self.parameter(plain, state)
        return self._argument(part, state)

    def _argument(self, part: Parameter, state: State) -> list[Segment]:
        """The word behind an operator; what is not quoted in it is split like the rest."""
        out: list[Segment] = []
        for inner in part.arguments[0].parts:
            segments = self.segments(Word((inner,), part.line), state)
            bare = isinstance(inner, Literal) and not inner.quoted and not part.quoted
            out.extend((segment[0], True) if bare and segment is not None else segment for segment in segments)
        return out or ([(Known("", self.place(part.line)), False)] if part.quoted else [])

    def assign(self, name: str, text: Text, state: State) -> None:
        """Give a variable a text, keeping what it is declared as."""
        before = state.lookup(name) or Variable()
        exported = before.exported or state.allexport
        state.set_variable(name, replace(before, text=text, items=None, exported=exported, associative=False))

    def _edit_text(self, part: Parameter, text: Text, state: State) -> Text:
        """``#``, ``%``, ``/``, ``^``, ``,``, ``:`` on one text."""
        at = self.place(part.line)
        unknown = unknown_of(text)
        value = known_text(text)
        if value is None:
            return (replace(unknown, source=short(part.source), many=False, options=()),) if unknown else ()
        result = self._edit(part, value, state)
        if result is None:
            return (Unknown(short(part.source), "is an expansion that is not decided", at),)
        self.context.note_edit(value, result)
        return (Known(result, at),)

    def _edit(self, part: Parameter, value: str, state: State) -> str | None:
        operator = part.operator
        try:
            if operator == ":":
                bounds = self._bounds(part, state, len(value))
                return None if bounds is None else value[bounds[0] : bounds[1]]
            if operator in ("@U", "@L", "@u"):
                return {"U": value.upper(), "L": value.lower(), "u": value[:1].upper() + value[1:]}[operator[1]]
            if operator.startswith("@"):
                return None
            pieces = self.pattern(part.arguments[0], state)
            if pieces is None:
                return None
            items = patterns.compile_pattern(pieces)
            self.context.spend(len(value) + (0 if all(kind == "one" for kind, _ in items) else len(items) * len(value) // 4))
            if operator in ("#", "##"):
                return patterns.without_head(items, value, operator == "##")
            if operator in ("%", "%%"):
                return patterns.without_tail(items, value, operator == "%%")
            if operator.startswith("/"):
                new = known_text(self.text(part.arguments[1], state)) if len(part.arguments) > 1 else ""
                return None if new is None else patterns.replace_matches(items, value, new, operator)
            change = str.upper if operator[0] == "^" else str.lower
            if len(operator) == 2:
                return "".join(change(c) if not items or patterns.matches(items, c) else c for c in value)
            return change(value[:1]) + value[1:] if not items or patterns.matches(items, value[:1]) else value
        except patterns.PatternTooLong:
            return None

    def _bounds(self, part: Parameter, state: State, length: int) -> tuple[int, int] | None:
        """Begin and end of ``${X:offset:length}``."""
        try:
            offset = self.number(part.arguments[0], state)
            count = self.number(part.arguments[1], state) if len(part.arguments) > 1 else None
        except (NotKnown, arithmetic.SumError):
            return None
        begin = offset if offset >= 0 else length + offset
        if begin < 0:
            return 0, 0
        end = length if count is None else begin + count if count >= 0 else length + count
        return begin, max(begin, end)

    def _slice(self, part: Parameter, state: State, listed: list[Text]) -> list[Text]:
        """``"${@:2}"``, ``"${A[@]:1:2}"``; the arguments are counted from 1, with ``$0`` before them."""
        place = self.place(part.line)
        if any(isinstance(piece, Unknown) and piece.many for text in listed for piece in text):
            return [tuple(_many(piece) for text in listed for piece in text if isinstance(piece, Unknown))]
        if part.name in ("@", "*"):
            listed = [(Known(state.name, place),), *listed]
        bounds = self._bounds(part, state, len(listed))
        if bounds is None:
            return [(Unknown(short(part.source), "is a slice that is not known", place, many=True),)]
        begin = (
            max(bounds[0], 1) if part.name in ("@", "*") and show_text(self.text(part.arguments[0], state)).strip() != "0" else bounds[0]
        )
        return listed[begin : bounds[1]]


def joins(part: object) -> bool:
    """Whether a part is ``$*`` or ``${NAME[*]}``, whose elements become one text."""
    return isinstance(part, Parameter) and (part.name == "*" or (part.index is not None and part.index.plain() == "*"))


def _order(key: int | str) -> int:
    return key if isinstance(key, int) else 0


def _many(piece: Piece) -> Piece:
    return replace(piece, many=True) if isinstance(piece, Unknown) else piece


def _empty(text: Text | None) -> bool | None:
    """Whether a text is empty; None where that is not known."""
    if text is None or known_text(text) == "":
        return True
    if any(isinstance(piece, Known) and piece.text for piece in text):
        return False
    return True if all(not isinstance(piece, Unknown) or piece.absent for piece in text) else None
