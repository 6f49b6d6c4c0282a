"""``[ ... ]``, ``test`` and ``[[ ... ]]``: true, false, or None where only a run can tell (a file, the output of a command)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msprobe_engine.config.launch_scripts.shell.expansion import arithmetic, patterns
from msprobe_engine.config.launch_scripts.shell.expansion.expand import Expander
from msprobe_engine.config.launch_scripts.shell.expansion.parameters import NotKnown
from msprobe_engine.config.launch_scripts.shell.syntax import Literal, Test, Word
from msprobe_engine.config.launch_scripts.shell.values import Known, State, Text, Unknown

_FILE_TESTS = frozenset(f"-{c}" for c in "abcdefghkprstuwxGLNOS")
_NUMBER_TESTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_TEXT_TESTS = ("=", "==", "!=", "<", ">", "-nt", "-ot", "-ef")
MAX_WORDS = 500


def opposite(value: bool | None) -> bool | None:
    return None if value is None else not value


def both(a: bool | None, b: bool | None) -> bool | None:
    """``a && b`` with what is not known."""
    return False if a is False or b is False else None if a is None or b is None else True


def either(a: bool | None, b: bool | None) -> bool | None:
    return opposite(both(opposite(a), opposite(b)))


def bracket(operands: Sequence[Text], expander: Expander, state: State) -> bool | None:
    """The value of ``[`` without its closing bracket."""
    return _Bracket(operands, expander, state).all() if len(operands) <= MAX_WORDS else None


class _Bracket:
    """The words of a test are counted first (POSIX): three with an operator in the middle are a comparison, whatever they look like."""

    def __init__(self, operands: Sequence[Text], expander: Expander, state: State) -> None:
        self._operands = operands
        self._words = [expander.assume_text(text) if len(text) != 1 or isinstance(text[0], Known) else None for text in operands]
        self._expander, self._state = expander, state
        self._at = 0

    def all(self) -> bool | None:
        count = len(self._words)
        if count == 0:
            return False
        if count == 1:
            return self._nonempty(0)
        if count == 2 and self._words[0] == "-n" and all(isinstance(piece, Unknown) and piece.many for piece in self._operands[1]):
            return True if self._expander.assume_text(self._operands[1]) == "" else None  # without quotes nothing is left but "-n", a text
        if count == 2:
            return opposite(self._nonempty(1)) if self._words[0] == "!" else self._unary(0)
        if count == 3 and self._words[1] in (*_NUMBER_TESTS, *_TEXT_TESTS):
            return self._binary(0)
        result = self._or()
        return result if self._at >= count else None

    def _or(self) -> bool | None:
        result = self._and()
        while self._at < len(self._words) and self._words[self._at] == "-o":
            self._at += 1
            result = either(result, self._and())
        return result

    def _and(self) -> bool | None:
        result = self._one()
        while self._at < len(self._words) and self._words[self._at] == "-a":
            self._at += 1
            result = both(result, self._one())
        return result

    def _one(self) -> bool | None:
        negated = False
        while self._at < len(self._words) and self._words[self._at] == "!":
            negated = not negated
            self._at += 1
        remaining = len(self._words) - self._at
        if remaining <= 0:
            return None
        if remaining >= 3 and self._words[self._at + 1] in (*_NUMBER_TESTS, *_TEXT_TESTS):
            result = self._binary(self._at)
            self._at += 3
        elif remaining >= 2 and (self._words[self._at] or "").startswith("-") and self._words[self._at] not in ("-a", "-o"):
            result = self._unary(self._at)
            self._at += 2
        else:
            result = self._nonempty(self._at)
            self._at += 1
        return opposite(result) if negated else result

    def _nonempty(self, i: int) -> bool | None:
        return nonempty(self._operands[i], self._expander)

    def _unary(self, i: int) -> bool | None:
        return unary(self._words[i] or "", self._operands[i + 1], self._expander, self._state)

    def _binary(self, i: int) -> bool | None:
        left, right = (self._expander.assume_text(self._operands[k]) for k in (i, i + 2))
        operator = self._words[i + 1] or ""
        if left is None or right is None:
            return None
        if operator in _NUMBER_TESTS:
            try:
                return _NUMBER_TESTS[operator](int(left), int(right))
            except ValueError:
                return False
        return compare_texts(left, operator, right)


def nonempty(text: Text, expander: Expander) -> bool | None:
    """``-n``: a text with known characters is not empty, whatever else is in it."""
    value = expander.assume_text(text)
    if value is not None:
        return value != ""
    return True if any(isinstance(piece, Known) and piece.text for piece in text) else None


def unary(operator: str, operand: Text, expander: Expander, state: State) -> bool | None:
    """``-n X``, ``-z X``, ``-v NAME``; of files only those are known that the script writes."""
    if operator == "-n":
        return nonempty(operand, expander)
    if operator == "-z":
        return opposite(nonempty(operand, expander))
    value = expander.assume_text(operand)
    if value is None:
        return None
    if operator == "-v":
        variable = state.lookup(value)
        return (
            True
            if (variable is not None and (variable.items or variable.text is not None))
            or (variable is None and value in expander.context.given)
            else False
            if expander.context.environment is not None
            else None
        )
    if operator in _FILE_TESTS:
        if not value:
            return False
        return True if value in state.written and operator in ("-a", "-e", "-f", "-r", "-s") else None
    return None


def compare_texts(left: str, operator: str, right: str) -> bool | None:
    if operator in ("=", "=="):
        return left == right
    if operator == "!=":
        return left != right
    if operator in ("<", ">"):
        return left < right if operator == "<" else left > right
    return None


def double_bracket(test: Test, expander: Expander, state: State) -> bool | None:
    """The value of ``[[ ... ]]``."""
    return _Double(test, expander, state).all() if len(test.items) <= MAX_WORDS else None


class _Double:
    def __init__(self, test: Test, expander: Expander, state: State) -> None:
        self._items, self._expander, self._state = test.items, expander, state
        self._at = 0
        self._depth = 0

    def all(self) -> bool | None:
        result = self._or()
        return result if self._at >= len(self._items) else None

    def _skip_operator(self, operator: str) -> bool:
        if self._at < len(self._items) and self._items[self._at] == operator:
            self._at += 1
            return True
        return False

    def _or(self) -> bool | None:
        result = self._and()
        while self._skip_operator("||"):
            result = either(result, self._and())
        return result

    def _and(self) -> bool | None:
        result = self._not()
        while self._skip_operator("&&"):
            result = both(result, self._not())
        return result

    def _not(self) -> bool | None:
        negated = False
        while self._plain() == "!":
            negated = not negated
            self._at += 1
        result: bool | None
        if self._skip_operator("("):
            self._depth += 1
            if self._depth > 20:
                self._at = len(self._items) + 1
                return None
            result = self._or()
            self._depth -= 1
            self._skip_operator(")")
        else:
            result = self._primary()
        return opposite(result) if negated else result

    def _plain(self, ahead: int = 0) -> str | None:
        """The item as an operator: text that is neither quoted nor expanded."""
        if self._at + ahead >= len(self._items):
            return None
        item = self._items[self._at + ahead]
        return item if isinstance(item, str) else item.plain()

    def _word(self, ahead: int) -> Word | None:
        item = self._items[self._at + ahead] if self._at + ahead < len(self._items) else None
        return Word((Literal(item, 0),), 0) if isinstance(item, str) else item

    def _primary(self) -> bool | None:
        first, operator, third = self._word(0), self._plain(1), self._word(2)
        if first is None:
            return None
        if operator in _NUMBER_TESTS or operator in (*_TEXT_TESTS, "=~"):
            self._at += 3
            return None if third is None else self._compare(first, operator or "", third)
        word = self._plain()
        second = self._word(1)
        if word and len(word) == 2 and word[0] == "-" and second is not None and not isinstance(self._items[self._at + 1], str):
            self._at += 2
            return unary(word, self._expander.text(second, self._state), self._expander, self._state)
        self._at += 1
        return nonempty(self._expander.text(first, self._state), self._expander)

    def _compare(self, first: Word, operator: str, third: Word) -> bool | None:
        if operator in _NUMBER_TESTS:
            try:
                return _NUMBER_TESTS[operator](self._expander.number(first, self._state), self._expander.number(third, self._state))
            except (NotKnown, arithmetic.SumError):
                return None
        left = self._expander.assume_text(self._expander.text(first, self._state))
        if left is None or operator == "=~":
            return None
        if operator in ("=", "==", "!="):
            pieces = self._expander.pattern(third, self._state, assumed=True)
            if pieces is None:
                return None
            try:
                result = patterns.matches(patterns.compile_pattern(pieces), left)
            except patterns.PatternTooLong:
                return None
            return result if operator != "!=" else not result
        right = self._expander.assume_text(self._expander.text(third, self._state))
        return None if right is None else compare_texts(left, operator, right)
