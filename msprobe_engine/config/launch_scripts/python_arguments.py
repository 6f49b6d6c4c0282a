"""Python argument files as settings, from their syntax tree alone: nothing in them is imported or run.

Read are assignments of plain values at module level (also in dictionaries and calls: ``dict(...)``, ``TrainingArguments(...)``),
defaults of ``add_argument`` and of dataclass fields.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any

from msprobe_engine.config.launch_scripts.static_values import Found
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.text.words import shorten_text, some

MAX_VALUES = 20_000
MAX_DEPTH = 30
MAX_BITS = 256
MAX_TEXT = 10_000


class _NotPlain(Exception):
    """The expression needs more than its syntax tree."""


_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
}


def read_python(text: str, file: str) -> tuple[dict[str, Found], list[str]]:
    """Settings of a Python file.

    Returns:
        dotted key -> value, and what could not be decided.

    Raises:
        DumpFormatError: it is no Python, or nested too deep.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes in the given text
            tree = ast.parse(text)
        reader = _Reader(file)
        reader.body(tree.body)
    except SyntaxError as error:
        raise DumpFormatError(f"{file}, line {error.lineno}: not valid Python: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise DumpFormatError(f"{file}: nested too deep") from None
    except ValueError as error:
        raise DumpFormatError(f"{file}: not valid Python: {error}") from None
    return reader.found, reader.notes()


class _Reader:
    def __init__(self, file: str) -> None:
        self._file = file
        self.found: dict[str, Found] = {}
        self._names: dict[str, Any] = {}
        self._open: list[tuple[int, str]] = []

    def notes(self) -> list[str]:
        if not self._open:
            return []
        places = some([f"{name} (line {line})" for line, name in self._open], 20)
        return [f"{self._file}: values that only running the file would give: {places}"]

    def body(self, statements: list[ast.stmt]) -> None:
        """Statements at module level; what stands in functions and branches is not decided."""
        for statement in statements:
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    self._read_assignment(target, statement.value, statement.lineno)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._read_assignment(statement.target, statement.value, statement.lineno)
            elif isinstance(statement, ast.AugAssign):
                self._forget(_dotted_name(statement.target), statement.lineno)
            elif isinstance(statement, ast.ClassDef):
                self._fields(statement)
            elif isinstance(statement, (ast.FunctionDef, ast.Expr)):
                self._arguments(statement)
            elif isinstance(statement, (ast.If, ast.For, ast.While, ast.Try, ast.With)):
                self._branch(statement)

    def _read_assignment(self, target: ast.expr, value: ast.expr, line: int) -> None:
        name = _dotted_name(target)
        if not name:
            return
        if isinstance(value, ast.Call) and value.keywords and not isinstance(value.func, ast.Call):
            self._call(name, value, 0)
            return
        self._store_value(name, value, line, 0)

    def _store_value(self, name: str, value: ast.expr, line: int, depth: int) -> None:
        """One value, or all in a dictionary or call, under dotted names."""
        if depth > MAX_DEPTH:
            raise RecursionError
        if isinstance(value, ast.Dict) and value.keys:
            for key, item in zip(value.keys, value.values):
                if isinstance(key, ast.Constant) and isinstance(key.value, (str, int)):
                    self._store_value(f"{name}.{key.value}", item, item.lineno, depth + 1)
                else:
                    self._open.append((line, name))
            return
        if isinstance(value, ast.Call) and value.keywords:
            self._call(name, value, depth + 1)
            return
        if isinstance(value, (ast.List, ast.Tuple)) and any(isinstance(item, (ast.Dict, ast.Call)) for item in value.elts):
            for i, item in enumerate(value.elts):
                self._store_value(f"{name}.{i}", item, item.lineno, depth + 1)
            return
        if len(self.found) >= MAX_VALUES:
            raise DumpFormatError(f"{self._file}: more than {MAX_VALUES} values; is this an argument file?")
        try:
            plain = self._value(value, 0)
        except _NotPlain:
            self._names.pop(name, None)
            self._open.append((line, name))
            self.found[name] = Found(_source(value), "python", self._file, line, False, "is known only when the file is run")
            return
        self._names[name] = plain
        self.found[name] = Found(plain, "python", self._file, line)

    def _call(self, name: str, call: ast.Call, depth: int) -> None:
        """``dict(lr=1e-4)``, ``TrainingArguments(learning_rate=...)``: the keywords; arguments of such classes keep their own names."""
        function = _dotted_name(call.func).rpartition(".")[2]
        prefix = "" if depth == 0 and function.endswith(("Arguments", "Args", "Namespace")) else f"{name}."
        for keyword in call.keywords:
            if keyword.arg is None:
                self._open.append((call.lineno, name))
            else:
                self._store_value(f"{prefix}{keyword.arg}", keyword.value, keyword.value.lineno, depth + 1)

    def _fields(self, statement: ast.ClassDef) -> None:
        """Defaults of the fields of a class (a dataclass of arguments)."""
        for item in statement.body:
            if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None):
                continue
            value = item.value
            if isinstance(value, ast.Call) and _dotted_name(value.func).rpartition(".")[2] in ("field", "Field"):
                defaults = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
                if not defaults:
                    continue
                value = defaults[0]
            self._store_value(item.target.id, value, item.lineno, 1)

    def _arguments(self, statement: ast.stmt) -> None:
        """Defaults of ``add_argument`` anywhere in a function or at module level."""
        for node in ast.walk(statement):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"):
                continue
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            long = next((name for name in names if name.startswith("--")), names[0] if names else "")
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if not long:
                continue
            name = long.lstrip("-")
            action = keywords.get("action")
            if "default" in keywords:
                self._store_value(name, keywords["default"], node.lineno, 1)
            elif isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
                self.found[name] = Found(action.value == "store_false", "python", self._file, node.lineno)

    def _branch(self, statement: ast.stmt) -> None:
        """What is assigned under a condition or in a loop is not decided."""
        for node in ast.walk(statement):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._forget(_dotted_name(target), node.lineno)

    def _forget(self, name: str, line: int) -> None:
        if not name:
            return
        self._names.pop(name, None)
        self._open.append((line, name))
        before = self.found.get(name)
        value = before.value if before is not None else None
        self.found[name] = Found(value, "python", self._file, line, False, f"is set again in line {line}, which may run or not")

    def _value(self, node: ast.expr, depth: int) -> Any:
        """A value from constants, names assigned before, containers and simple arithmetic.

        Raises:
            _NotPlain: it needs more.
        """
        if depth > MAX_DEPTH:
            raise _NotPlain
        if isinstance(node, ast.Constant):
            if node.value is None or isinstance(node.value, (bool, float)):
                return node.value
            if isinstance(node.value, str) and len(node.value) <= MAX_TEXT:
                return node.value
            if isinstance(node.value, int) and node.value.bit_length() <= MAX_BITS:
                return node.value
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self._value(item, depth + 1) for item in node.elts]
        elif isinstance(node, ast.Dict) and not node.keys:
            return {}
        elif isinstance(node, (ast.Name, ast.Attribute)) and (name := _dotted_name(node)) in self._names:
            return self._names[name]
        elif isinstance(node, ast.Attribute) and _dotted_name(node).startswith(
            ("torch.", "mindspore.", "mstype.", "np.", "numpy.", "jnp.")
        ):
            return _dotted_name(node)
        elif isinstance(node, ast.UnaryOp):
            return self._unary(node, depth)
        elif isinstance(node, ast.BinOp):
            return self._arithmetic(node, depth)
        elif isinstance(node, ast.JoinedStr):
            return self._join_parts(node, depth)
        raise _NotPlain

    def _unary(self, node: ast.UnaryOp, depth: int) -> Any:
        value = self._value(node.operand, depth + 1)
        if isinstance(node.op, ast.Not) and isinstance(value, (bool, int)):
            return not value
        if isinstance(value, (int, float)) and isinstance(node.op, (ast.USub, ast.UAdd)):
            return -value if isinstance(node.op, ast.USub) else value
        raise _NotPlain

    def _arithmetic(self, node: ast.BinOp, depth: int) -> Any:
        """Numbers of bounded size; two texts or lists that are put together."""
        left, right = self._value(node.left, depth + 1), self._value(node.right, depth + 1)
        operator = _BINARY.get(type(node.op))
        if operator == "+" and isinstance(left, str) and isinstance(right, str) and len(left) + len(right) <= MAX_TEXT:
            return left + right
        if operator == "+" and isinstance(left, list) and isinstance(right, list) and len(left) + len(right) <= MAX_VALUES:
            return left + right
        if operator is None or not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
            raise _NotPlain
        try:
            result = _calculate(left, operator, right)
        except (ArithmeticError, TypeError, ValueError):
            raise _NotPlain from None
        if isinstance(result, int) and result.bit_length() > MAX_BITS:
            raise _NotPlain
        return result

    def _join_parts(self, node: ast.JoinedStr, depth: int) -> str:
        out = ""
        for part in node.values:
            if isinstance(part, ast.FormattedValue) and part.format_spec is None and part.conversion == -1:
                out += str(self._value(part.value, depth + 1))
            elif isinstance(part, ast.Constant):
                out += str(part.value)
            else:
                raise _NotPlain
            if len(out) > MAX_TEXT:
                raise _NotPlain
        return out


def _calculate(left: float, operator: str, right: float) -> float:
    if operator in ("**", "<<") and not (abs(right) <= MAX_BITS and abs(left) <= 1 << 64):
        raise _NotPlain
    if operator in ("**", "<<") and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 4 * MAX_BITS:
        raise _NotPlain
    if operator == "**":
        result = left**right
        if isinstance(result, complex):
            raise _NotPlain
        return float(result) if isinstance(result, float) else int(result)
    if operator == "<<":
        if not (isinstance(left, int) and isinstance(right, int)):
            raise _NotPlain
        return left << right
    return {
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "/": lambda: left / right,
        "//": lambda: left // right,
        "%": lambda: left % right,
    }[operator]()


def _dotted_name(node: ast.AST) -> str:
    """``a.b.c`` of names and attributes, also ``a["b"]``; empty for other targets."""
    parts: list[str] = []
    for _ in range(MAX_DEPTH):
        if isinstance(node, ast.Name):
            return ".".join([node.id, *reversed(parts)])
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            parts.append(node.slice.value)
            node = node.value
        else:
            return ""
    return ""


def _source(node: ast.expr) -> str:
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "..."
    return shorten_text(text, 200)
