"""Arithmetic of the shell: integers of 64 bits, variables, assignments. Nothing is evaluated as Python."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(?:(\d+#[0-9A-Za-z@_]+|0[xX][0-9A-Fa-f]+|\d+)|([A-Za-z_]\w*)|(\*\*|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>!~&|^?:=(),]))"
)
_BINARY = [("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<=", ">=", "<", ">"), ("<<", ">>"), ("+", "-"), ("*", "/", "%")]
_ASSIGNING = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^=")
MAX_TOKENS = 10_000
MAX_DEPTH = 20


class SumError(Exception):
    """The expression is none, or divides by zero; the message is a phrase."""


def wrap_to_64_bits(number: int) -> int:
    """As a signed integer of 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def value(expression: str, get: Callable[[str], str], put: Callable[[str, int], None]) -> int:
    """The value of an expression.

    Args:
        get: the text of a variable, empty where it is unset; may raise.
        put: sets a variable.

    Raises:
        SumError: it is no expression.
    """
    return _Sum(expression, get, put).all()


class _Sum:
    def __init__(self, expression: str, get: Callable[[str], str], put: Callable[[str, int], None], depth: int = 0) -> None:
        self._get, self._put, self._depth = get, put, depth
        self._tokens: list[str] = []
        self._at = 0
        pos, text = 0, expression.strip()
        while pos < len(text):
            match = _TOKEN.match(text, pos)
            if match is None or len(self._tokens) > MAX_TOKENS:
                raise SumError(f"'{text[pos : pos + 20]}' is no arithmetic")
            self._tokens.append(match[0].strip())
            pos = match.end()

    def all(self) -> int:
        if not self._tokens:
            return 0
        result = self._comma()
        if self._at < len(self._tokens):
            raise SumError(f"'{self._tokens[self._at]}' is not expected")
        return result

    def _next_of(self, *allowed: str) -> str:
        if self._at < len(self._tokens) and self._tokens[self._at] in allowed:
            self._at += 1
            return self._tokens[self._at - 1]
        return ""

    def _comma(self) -> int:
        result = self._assignment()
        while self._next_of(","):
            result = self._assignment()
        return result

    def _assignment(self) -> int:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise SumError("nested too deep")
        try:
            name = self._tokens[self._at] if self._at < len(self._tokens) else ""
            operator = self._tokens[self._at + 1] if self._at + 1 < len(self._tokens) else ""
            if re.match(r"[A-Za-z_]", name) and operator in _ASSIGNING:
                self._at += 2
                right = self._assignment()
                result = right if operator == "=" else _apply_operator(operator[:-1], self._variable(name), right)
                self._put(name, result)
                return result
            return self._choice()
        finally:
            self._depth -= 1

    def _choice(self) -> int:
        condition = self._binary(0)
        if not self._next_of("?"):
            return condition
        get, put = self._get, self._put
        self._put = put if condition else _ignore_assignment
        if_true = self._assignment()
        if not self._next_of(":"):
            raise SumError("':' is missing")
        self._put = _ignore_assignment if condition else put
        if_false = self._assignment()
        self._get, self._put = get, put
        return if_true if condition else if_false

    def _binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self._power()
        left = self._binary(level + 1)
        while operator := self._next_of(*_BINARY[level]):
            put = self._put
            skipped = (operator == "&&" and not left) or (operator == "||" and bool(left))
            if skipped:
                self._put = _ignore_assignment
            right = self._binary(level + 1)
            self._put = put
            left = int(bool(left)) if skipped else _apply_operator(operator, left, right)
        return left

    def _power(self) -> int:
        base = self._unary()
        if not self._next_of("**"):
            return base
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise SumError("nested too deep")
        exponent = self._power()
        self._depth -= 1
        if exponent < 0:
            raise SumError("the exponent is below zero")
        return wrap_to_64_bits(pow(base, exponent, 1 << 64))

    def _unary(self) -> int:
        signs = []
        while operator := self._next_of("++", "--", "+", "-", "!", "~"):
            if operator in ("++", "--") and self._at < len(self._tokens) and re.match(r"[A-Za-z_]", self._tokens[self._at]):
                name = self._tokens[self._at]
                self._put(name, wrap_to_64_bits(self._variable(name) + (1 if operator == "++" else -1)))
                break
            signs.append(operator)
        result = self._atom()
        for sign in reversed(signs):
            result = {"-": -result, "!": int(not result), "~": ~result}.get(sign, result)
        return wrap_to_64_bits(result)

    def _atom(self) -> int:
        if self._next_of("("):
            result = self._comma()
            if not self._next_of(")"):
                raise SumError("')' is missing")
            return result
        if self._at >= len(self._tokens):
            raise SumError("the expression ends early")
        token = self._tokens[self._at]
        self._at += 1
        if token[0].isdigit():
            return _number(token)
        if not re.match(r"[A-Za-z_]", token):
            raise SumError(f"'{token}' is not expected")
        result = self._variable(token)
        if operator := self._next_of("++", "--"):
            self._put(token, wrap_to_64_bits(result + (1 if operator == "++" else -1)))
        return result

    def _variable(self, name: str) -> int:
        """Its value; a value that is an expression is evaluated, as bash does."""
        text = self._get(name).strip()
        if re.fullmatch(r"-?[1-9]\d{0,17}|0|", text):
            return int(text or 0)
        if self._depth >= MAX_DEPTH - 1:
            raise SumError("variables that name each other")
        return _Sum(text, self._get, self._put, self._depth + 2).all()


def _ignore_assignment(name: str, number: int) -> None:
    """Assignments of a branch that is not taken."""


def _number(token: str) -> int:
    try:
        if "#" in token:
            base, _, digits = token.partition("#")
            if not 2 <= int(base) <= 36:
                raise SumError(f"the base of '{token}' is not from 2 to 36")
            return wrap_to_64_bits(int(digits, int(base)))
        if token[:2] in ("0x", "0X"):
            return wrap_to_64_bits(int(token, 16))
        return wrap_to_64_bits(int(token, 8) if token.startswith("0") else int(token))
    except ValueError:
        raise SumError(f"'{token[:40]}' is no number") from None


def _apply_operator(operator: str, left: int, right: int) -> int:
    if operator in ("/", "%"):
        if right == 0:
            raise SumError("division by zero")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return wrap_to_64_bits(quotient if operator == "/" else left - right * quotient)
    results: dict[str, Callable[[], int]] = {
        "||": lambda: int(bool(left) or bool(right)),
        "&&": lambda: int(bool(left) and bool(right)),
        "|": lambda: left | right,
        "^": lambda: left ^ right,
        "&": lambda: left & right,
        "==": lambda: int(left == right),
        "!=": lambda: int(left != right),
        "<=": lambda: int(left <= right),
        ">=": lambda: int(left >= right),
        "<": lambda: int(left < right),
        ">": lambda: int(left > right),
        "<<": lambda: left << (right % 64),
        ">>": lambda: left >> (right % 64),
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
    }
    return wrap_to_64_bits(results[operator]())
