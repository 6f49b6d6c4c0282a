"""Expansions of words: parameters, arithmetic, splitting into fields. What cannot be known becomes an `Unknown` piece, never a guess."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msprobe_engine.config.launch_scripts.shell.context import Context, short
from msprobe_engine.config.launch_scripts.shell.expansion import arithmetic, braces
from msprobe_engine.config.launch_scripts.shell.expansion.parameters import NotKnown, Parameters, Segment, joins
from msprobe_engine.config.launch_scripts.shell.syntax import Arithmetic, Literal, Parameter, ProcessFile, Substitution, Word
from msprobe_engine.config.launch_scripts.shell.values import Known, Piece, State, Text, Unknown, Variable, known_text, unknown_of

WHITESPACE = " \t\n"
_COST_OF_FIELD = 20
"""Characters that one field counts as in the limits of a reading: it is an object, and a short one costs as much as a long one."""


class Expander(Parameters):
    """Expands words in a state.

    Args:
        capture: what ``$(...)`` gives, where that is known without running anything.
    """

    def __init__(self, context: Context, capture: Callable[[Substitution, State], Text]) -> None:
        super().__init__(context)
        self._capture = capture

    def fields(self, words: tuple[Word, ...] | list[Word], state: State) -> list[Text]:
        """The words after all expansions, split into fields."""
        out: list[Text] = []
        for word in words:
            for single in braces.expand_braces(word):
                fields = self._split_segments(self.segments(single, state), state)
                self.context.spend(_COST_OF_FIELD * len(fields))
                out.extend(fields)
        return out

    def text(self, word: Word, state: State) -> Text:
        """One text, not split: the value of an assignment, a here-document, the subject of ``case``."""
        at = self.place(word.line)
        between = self.joint(state, at) if any(joins(part) for part in word.parts) else Known(" ", at)
        return tuple(between if segment is None else segment[0] for segment in self.segments(word, state))

    def pattern(self, word: Word, state: State, assumed: bool = False) -> list[tuple[str, bool]] | None:
        """The word as pattern: texts, and whether they stand for themselves; None where it is not known. `assumed`: a variable that nothing
        sets is empty there."""
        out: list[tuple[str, bool]] = []
        for part in word.parts:
            if isinstance(part, Literal):
                out.append((part.text, part.quoted))
                continue
            value = self.text(Word((part,), word.line), state)
            text = self.assume_text(value) if assumed else known_text(value)
            if text is None:
                return None
            out.append((text, part.quoted))
        return out

    def number(self, expression: Word, state: State) -> int:
        """The value of an arithmetic expression.

        Raises:
            NotKnown: it has a value that is not known.
            sums.SumError: it is none.
        """

        def get(name: str) -> str:
            text = self.of_name(name, state, self.place(expression.line), name)
            value = "" if text is None else self.assume_text(text)
            if value is None:
                raise NotKnown(unknown_of(text or ()) or Unknown(name, "", self.place(expression.line)))
            return value

        def assign_number(name: str, number: int) -> None:
            before = state.lookup(name) or Variable()
            state.set_variable(name, replace(before, text=(Known(str(number), self.place(expression.line)),), items=None))

        text = self.text(expression, state)
        value = self.assume_text(text)
        if value is None:
            raise NotKnown(unknown_of(text) or Unknown("", "", self.place(expression.line)))
        self.context.spend(len(value))
        return arithmetic.value(value, get, assign_number)

    # segments

    def segments(self, word: Word, state: State) -> list[Segment]:
        out: list[Segment] = []
        for i, part in enumerate(word.parts):
            place = self.place(part.line)
            if isinstance(part, Literal):
                if i == 0 and not part.quoted and part.text.startswith("~") and (part.text == "~" or part.text[1:2] == "/"):
                    home = self.of_name("HOME", state, place, "~")
                    out.extend((piece, False) for piece in home or ())
                    out.append((Known(part.text[1:], place), False))
                else:
                    out.append((Known(part.text, place), False))
            elif isinstance(part, Parameter):
                out.extend(self.parameter(part, state))
            elif isinstance(part, Substitution):
                out.extend((piece, not part.quoted) for piece in self._capture(part, state))
            elif isinstance(part, Arithmetic):
                total = self._arithmetic(part, state)
                out.append((total, isinstance(total, Known) and not part.quoted))
            elif isinstance(part, ProcessFile):
                out.append((Unknown(short(part.source), "is a file that only a run has", place), False))
        self.context.spend(sum(len(s[0].text) for s in out if s is not None and isinstance(s[0], Known)))
        return out

    def _arithmetic(self, part: Arithmetic, state: State) -> Piece:
        at = self.place(part.line)
        try:
            return Known(str(self.number(part.expression, state)), at)
        except NotKnown as error:
            return Unknown(short(part.source), f"needs {error.unknown.source}, which {error.unknown.why}", at)
        except arithmetic.SumError as error:
            return Unknown(short(part.source), f"is no arithmetic ({error})", at)

    def _split_segments(self, segments: list[Segment], state: State) -> list[Text]:
        """Fields of the segments, by ``IFS``."""
        value = state.value_of("IFS")
        separators = (known_text(value) or "") if value is not None else WHITESPACE
        fields: list[Text] = []
        current: list[Piece] | None = None
        for segment in segments:
            if segment is None:
                if current is not None:
                    fields.append(tuple(current))
                current = None
                continue
            piece, split = segment
            if not split or not separators:
                current = [] if current is None else current
                current.append(piece)
                continue
            if isinstance(piece, Unknown):
                current = current or []
                words = tuple(tuple(word for text in option for word in text.split()) for option in piece.options)
                current.append(replace(piece, many=True, options=words))
                continue
            for kind, text in split_fields(piece.text, separators):
                if kind == "end":
                    if current is not None or text:
                        fields.append(tuple(current or (Known("", piece.at),)))
                    current = None
                else:
                    current = current or []
                    current.append(Known(text, piece.at))
        if current is not None:
            fields.append(tuple(current))
        return fields


def split_fields(text: str, separators: str) -> list[tuple[str, str]]:
    """("text", word) and ("end", "x" where an empty field counts) of a text that is split at `separators`."""
    out: list[tuple[str, str]] = []
    start, i = 0, 0
    while i < len(text):
        if text[i] not in separators:
            i += 1
            continue
        if i > start:
            out.append(("text", text[start:i]))
        hard = 0
        while i < len(text) and text[i] in separators:
            if text[i] not in WHITESPACE:
                if hard:
                    out.append(("end", "x"))
                hard += 1
            i += 1
        out.append(("end", "x" if hard else ""))
        start = i
    if start < len(text):
        out.append(("text", text[start:]))
    return out
