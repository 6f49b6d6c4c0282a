"""Conditions as data: a small language over the numbers of a step, read with `ast` and a whitelist. Nothing is ever evaluated by Python.

::

    loss > 2 * median(loss) and grad_norm > 10
    norm("grad_reduced", "layers.*.attn.*") / norm("grad_reduced", "*") > 0.9
    isnan(loss) or delta(loss_scale) < 0

Names are numbers of the step; ``scalar("lm loss")`` is one whose name is no identifier. ``OP("family", "pattern"[, "phase"])`` is a
statistic over all samples of a family whose name matches: ``norm``, ``rms``, ``absmax``, ``min``, ``max``, ``mean``, ``zeros`` (share),
``nans``, ``infs``. ``median mean min max (x)`` look at the last values of x before this step, ``last(x)`` is the one before,
``delta(x)`` is x - last(x), ``ratio(x)`` is x / median(x). ``abs``, ``isnan``, ``isinf`` are what they say.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.records import FAMILIES
from msprobe_engine.core.text.words import shorten_text

_BLANK = {ord(sign): " " for sign in "\n\r\t\f"}
LENGTH, NODES, DEPTH = 1000, 200, 20
"""Limits of an expression: characters, nodes, depth."""

ALLOWED = (
    "names of numbers of the step, numbers, < <= > >= == !=, and or not, + - * /, scalar('name'), "
    "norm rms absmax min max mean zeros nans infs ('family', 'pattern'[, 'phase']), "
    "median mean min max last delta ratio (x), abs isnan isinf (x)"
)

SELECTORS = ("norm", "rms", "absmax", "min", "max", "mean", "zeros", "nans", "infs")
_WINDOWED: dict[str, Callable[[list[float], float], float]] = {
    "median": lambda past, _x: float(np.median(past)),
    "mean": lambda past, _x: math.fsum(past) / len(past),
    "min": lambda past, _x: min(past),
    "max": lambda past, _x: max(past),
    "last": lambda past, _x: past[-1],
    "delta": lambda past, x: x - past[-1],
    "ratio": lambda past, x: _divide(x, float(np.median(past))),
}
_PLAIN: dict[str, Callable[[float], Any]] = {"abs": abs, "isnan": math.isnan, "isinf": math.isinf}
_TRUTH = ("isnan", "isinf")
_COMPARE: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: _divide(a, b),
}


def _divide(a: float, b: float) -> float:
    return a / b if b else math.nan


class MissingValue(Exception):
    """The step does not hold a number that the expression names: nothing can be said about it."""


class Source(Protocol):
    """Where an expression finds its numbers; both raise `MissingValue`."""

    def scalar(self, name: str) -> float: ...

    def select(self, op: str, family: str, pattern: str, phase: str) -> float: ...


Value = Callable[[Source], Any]


class _Node(NamedTuple):
    """A part of the expression: how to get its value, whether it is true or false rather than a number."""

    value: Value
    truth: bool


class _Window:
    """The past of one sub-expression."""

    def __init__(self, function: str, argument: Value, window: int, warmup: int, text: str) -> None:
        self.text = text
        self._function = _WINDOWED[function]
        self._argument = argument
        self._past: deque[float] = deque(maxlen=window)
        self._needed = 1 if function in ("last", "delta") else min(warmup, window)
        self._now = math.nan
        self._value: float | None = None

    def prepare(self, source: Source) -> None:
        """Work out this step's value; the step's own number enters the past with `finish`."""
        self._value, self._now = None, math.nan
        try:
            self._now = float(self._argument(source))
        except MissingValue:
            return
        if len(self._past) >= self._needed:
            self._value = self._function(list(self._past), self._now)

    def finish(self) -> None:
        """The step is over."""
        if math.isfinite(self._now):
            self._past.append(self._now)

    def value(self, _source: Source) -> float:
        if self._value is None:
            raise MissingValue(self.text)
        return self._value


class Expression:
    """A parsed expression with the memory of its windows.

    Args:
        window: how many past values the window functions look at.
        warmup: how many of them have to be there.
        where: the key it stands in, for messages.

    Raises:
        SettingsError: it is not allowed; the message names the column and what is.
    """

    def __init__(self, text: str, *, window: int = 50, warmup: int = 10, where: str = "when") -> None:
        self._where = where
        self._window, self._warmup = window, warmup
        self._nodes = 0
        self._windows: list[_Window] = []
        self.leaves: dict[str, Value] = {}
        """Numbers that the expression looks at, by their text: what an alert shows."""
        self.numbers: dict[str, Value] = {}
        """Those of `leaves` that the step itself has to hold, functions over the past left out."""
        if len(text) > LENGTH:
            raise SettingsError(f"{where}: the expression has {len(text)} characters; allowed: at most {LENGTH}")
        flat = text.translate(_BLANK).strip()
        if not flat:
            raise SettingsError(f"{where}: the expression is empty; allowed: {ALLOWED}")
        self.text = flat
        try:
            tree = ast.parse(flat, mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            column = getattr(error, "offset", None)
            place = f", column {column}" if column else ""
            reason = getattr(error, "msg", None) or type(error).__name__
            raise SettingsError(f"{where}{place}: {reason} in {_short(flat)}; allowed: {ALLOWED}") from None
        root = self._build(tree.body, 0)
        if not root.truth:
            self._refuse(tree.body, "the expression is a number, not something that holds or not; compare it with one")
        self._root = root.value

    def judge(self, source: Source) -> tuple[bool, dict[str, float]] | None:
        """Does it hold for this step? With the numbers it looked at. None when it cannot be said: a number is missing, or a window is
        not filled yet. To be called once per step."""
        for window in self._windows:
            window.prepare(source)
        try:
            holds = bool(self._root(source))
            return holds, self._read_leaves(source) if holds else {}
        except MissingValue:
            return None
        finally:
            for window in self._windows:
                window.finish()

    def find_missing(self, source: Source, texts: Iterable[str]) -> set[str]:
        """Which of these `numbers` the step does not hold."""
        out = set()
        for text in texts:
            try:
                self.numbers[text](source)
            except MissingValue:
                out.add(text)
        return out

    def _read_leaves(self, source: Source) -> dict[str, float]:
        seen: dict[str, float] = {}
        for text, value in self.leaves.items():
            try:
                seen[text] = float(value(source))
            except MissingValue:
                continue
        return seen

    def _refuse(self, node: ast.AST, problem: str) -> NoReturn:
        column = getattr(node, "col_offset", 0) + 1
        raise SettingsError(f"{self._where}, column {column}: {problem}, in {_short(self.text)}; allowed: {ALLOWED}")

    def _build(self, node: ast.expr, depth: int) -> _Node:
        self._nodes += 1
        if depth > DEPTH or self._nodes > NODES:
            self._refuse(node, f"the expression is too large; at most {NODES} parts, {DEPTH} deep")
        if isinstance(node, ast.Constant):
            return _Node(self._number(node), False)
        if isinstance(node, ast.Name):
            name = node.id
            value: Value = lambda source: source.scalar(name)  # noqa: E731
            self.leaves[name] = self.numbers[name] = value
            return _Node(value, False)
        if isinstance(node, ast.BoolOp):
            return self._both(node, depth)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node, depth)
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node, depth)
        if isinstance(node, ast.Compare):
            return self._compare(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        return self._refuse(node, f"{_word(node)} is not allowed")

    def _number(self, node: ast.Constant) -> Value:
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
            self._refuse(node, f"{_short(repr(node.value))} is no number")
        try:
            number = float(node.value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self._refuse(node, "the number is too large")
        return lambda _source: number

    def _both(self, node: ast.BoolOp, depth: int) -> _Node:
        parts = [self._truth(part, depth) for part in node.values]
        if isinstance(node.op, ast.And):
            return _Node(lambda source: all(part(source) for part in parts), True)
        return _Node(lambda source: any(part(source) for part in parts), True)

    def _unary(self, node: ast.UnaryOp, depth: int) -> _Node:
        if isinstance(node.op, ast.Not):
            inner = self._truth(node.operand, depth)
            return _Node(lambda source: not inner(source), True)
        if not isinstance(node.op, (ast.USub, ast.UAdd)):
            self._refuse(node, "~ is not allowed")
        value = self._value(node.operand, depth)
        return _Node((lambda source: -value(source)) if isinstance(node.op, ast.USub) else value, False)

    def _arithmetic(self, node: ast.BinOp, depth: int) -> _Node:
        operation = _ARITHMETIC.get(type(node.op))
        if operation is None:
            self._refuse(node, f"the operator {type(node.op).__name__} is not allowed")
        left, right = self._value(node.left, depth), self._value(node.right, depth)
        return _Node(lambda source: operation(left(source), right(source)), False)

    def _compare(self, node: ast.Compare, depth: int) -> _Node:
        operations = [_COMPARE.get(type(op)) for op in node.ops]
        if None in operations:
            self._refuse(node, "this comparison is not allowed")
        known = [op for op in operations if op is not None]
        parts = [self._value(part, depth) for part in (node.left, *node.comparators)]

        def value(source: Source) -> bool:
            numbers = [part(source) for part in parts]
            return all(op(a, b) for op, a, b in zip(known, numbers, numbers[1:]))

        return _Node(value, True)

    def _call(self, node: ast.Call, depth: int) -> _Node:
        if not isinstance(node.func, ast.Name):
            self._refuse(node, "only functions by name can be called")
        name = node.func.id
        if node.keywords or any(isinstance(argument_node, ast.Starred) for argument_node in node.args):
            self._refuse(node, f"{name} takes its arguments in order, without names or stars")
        texts = [
            argument_node.value
            for argument_node in node.args
            if isinstance(argument_node, ast.Constant) and isinstance(argument_node.value, str)
        ]
        if texts and len(texts) != len(node.args):
            self._refuse(node, f"{name} takes texts or one number, not both")
        if texts:
            value = self._build_selector(node, name, texts)
            self.leaves[ast.unparse(node)] = self.numbers[ast.unparse(node)] = value
            return _Node(value, False)
        if name not in _WINDOWED and name not in _PLAIN:
            functions = [*_WINDOWED, *_PLAIN, *SELECTORS, "scalar"]
            near = difflib.get_close_matches(name, functions, 1)
            self._refuse(node, f"there is no function {_short(name)}" + (f"; did you mean '{near[0]}'?" if near else ""))
        if len(node.args) != 1:
            self._refuse(node, f"{name} takes one argument")
        argument = self._value(node.args[0], depth)
        if name in _PLAIN:
            plain = _PLAIN[name]
            return _Node(lambda source: plain(argument(source)), name in _TRUTH)
        window = _Window(name, argument, self._window, self._warmup, ast.unparse(node))
        self._windows.append(window)
        self.leaves[window.text] = window.value
        return _Node(window.value, False)

    def _build_selector(self, node: ast.Call, name: str, texts: list[str]) -> Value:
        if name == "scalar":
            if len(texts) != 1:
                self._refuse(node, "scalar takes the name of one number")
            return lambda source: source.scalar(texts[0])
        if name not in SELECTORS or len(texts) not in (2, 3):
            self._refuse(node, f'{_short(name)} with texts is not allowed; write OP("family", "pattern"), OP one of {", ".join(SELECTORS)}')
        family, pattern = texts[0], texts[1]
        phase = texts[2] if len(texts) == 3 else ""
        if family not in FAMILIES:
            near = difflib.get_close_matches(family, FAMILIES, 1)
            hint = f"; did you mean '{near[0]}'?" if near else f": one of {', '.join(FAMILIES)}"
            self._refuse(node, f"there is no family {_short(family)}{hint}")
        return lambda source: source.select(name, family, pattern, phase)

    def _value(self, node: ast.expr, depth: int) -> Value:
        built = self._build(node, depth + 1)
        if built.truth:
            self._refuse(node, "a number is needed here, not something that holds or not")
        return built.value

    def _truth(self, node: ast.expr, depth: int) -> Value:
        built = self._build(node, depth + 1)
        if not built.truth:
            self._refuse(node, "a comparison is needed here, not a number")
        return built.value


def _word(node: ast.AST) -> str:
    words = {
        ast.Attribute: "access to an attribute",
        ast.Subscript: "an index",
        ast.Lambda: "a function",
        ast.IfExp: "if ... else",
        ast.JoinedStr: "a formatted text",
        ast.NamedExpr: "an assignment",
    }
    return words.get(type(node), f"{type(node).__name__}")


def _short(text: str) -> str:
    return repr(shorten_text(text))
