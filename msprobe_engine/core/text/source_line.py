"""A line of a call stack as a reader wants it: ``train.py:6 rope_tables``, and what an argument of a call is called there.

Stack lines are data: their code is parsed and never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msprobe_engine.core.log import one_line

_LINE = re.compile(r"\s*File (?P<file>.+?), line (?P<line>\d{1,9}), in (?P<function>[^,]+),\s*(?P<code>.*)", re.DOTALL)
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_MACHINERY = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?:torch|mindspore)[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\](?!(?:site|dist)-packages)"
    r"|[/\\](?:msprobe|msprobe_engine|msprobe_integrations)[/\\]|<frozen|, in (?:wrapped|wrapper|inner)\b"
)
"""In lines of torch, MindSpore, Python itself and the probe, and of functions that only call another."""
_CALLED_BY = "; called by "
_LONGEST = 500
"""Characters of code that are parsed."""
_LONGEST_NAME = 40
_LONGEST_WRITTEN = 2 * _LONGEST_NAME
"""Bytes of an expression that is put into words: it may be nested as deep as it is long, and words are found by recursion."""
_SIGNS: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "mul": ast.Mult,
    "truediv": ast.Div,
    "floordiv": ast.FloorDiv,
    "mod": ast.Mod,
    "pow": ast.Pow,
    "matmul": ast.MatMult,
}
"""Methods of operators, without underscores and without the r of a reflected one."""


class SourceLine(NamedTuple):
    """The parts of a stack line: path of the file, number of the line, function, and the code that stands there."""

    file: str
    line: int
    function: str
    code: str

    @property
    def place(self) -> str:
        """``train.py:6 rope_tables``; outside of functions ``train.py:62``."""
        name = re.split(r"[/\\]", self.file.strip('"'))[-1]
        return f"{name}:{self.line}" + ("" if self.function == "<module>" else f" {self.function}")


def parse_line(text: str) -> SourceLine | None:
    """The parts of ``File /home/me/train.py, line 6, in rope_tables, inv = 1.0 / base``; None of anything else."""
    match = _LINE.fullmatch(text.partition(f"{_CALLED_BY}File ")[0])
    return SourceLine(match["file"], int(match["line"]), match["function"], match["code"].strip()) if match else None


def source_of(stack: Sequence[str]) -> str:
    """The innermost line of the model, or of what trains it; of a library's, the line of the user's own that led there stands behind it.

    Args:
        stack: lines of a recorded call stack, innermost first.

    Returns:
        The innermost line of all where every line is of torch, MindSpore, Python itself or the probe; "" for an empty stack.
    """
    lines = [line for line in stack if not _MACHINERY.search(line)] or list(stack[:1])
    if not lines:
        return ""
    own = next((line for line in lines if not _LIBRARY.search(line)), "")
    return lines[0] if own in ("", lines[0]) else f"{lines[0]}{_CALLED_BY}{own}"


def place_in_source(text: str) -> str:
    """``train.py:6 rope_tables`` of `source_of` a stack; "" of anything else, and of a line of torch, MindSpore or the like."""
    line = parse_line(text)
    return one_line(line.place) if line is not None and not _MACHINERY.search(text.partition(_CALLED_BY)[0]) else ""


def library_function(text: str) -> tuple[str, str] | None:
    """Path within the installed packages and name of the function of a stack line; None of what is no library's."""
    line = parse_line(text)
    within = _LIBRARY.split(line.file)[1:] if line is not None else []
    return (within[-1].strip('"'), line.function) if line is not None and within else None


def argument_text(code: str, function: str, place: int | str, method: bool = False) -> str:
    """What is written for an argument of a call: ``self.eps`` of position 3 in ``F.rms_norm(x, (8,), w, self.eps)``, ``-step_size`` of
    ``value`` in ``param.addcdiv_(exp_avg, denom, value=-step_size)``.

    Args:
        code: one line of source.
        function: name of the function, of a method, or of an operator (``__rpow__``).
        place: of the argument: its position, from 0, or its name.
        method: position 0 is the tensor that the method is called on.

    Returns:
        A short expression that names something; "" where there is none, or more than one that it may be.
    """
    sign = _SIGNS.get(function.strip("_")) or _SIGNS.get(function.strip("_").removeprefix("r").removeprefix("i"))
    texts = set()
    for node in _nodes(code):
        if sign is not None and isinstance(node, ast.BinOp) and isinstance(node.op, sign) and function.startswith("__"):
            reflected = function.startswith("__r")
            texts.add(_format_expression(node.right if (place == 1) != reflected else node.left))
        elif isinstance(node, ast.Call) and not any(isinstance(argument, ast.Starred) for argument in node.args):
            texts.add(_of_call(node, function, place - 1 if method and isinstance(place, int) else place))
    texts.discard("")
    return texts.pop() if len(texts) == 1 else ""


def _of_call(node: ast.Call, function: str, place: int | str) -> str:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
    if called != function:
        return ""
    if place == -1:
        return _format_expression(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if isinstance(place, str):
        return next((_format_expression(keyword.value) for keyword in node.keywords if keyword.arg == place), "")
    return _format_expression(node.args[place]) if 0 <= place < len(node.args) else ""


def _format_expression(node: ast.expr) -> str:
    """The text of an expression that names something and is short enough to be shown; else ""."""
    if node.end_lineno != node.lineno or (node.end_col_offset or 0) - node.col_offset > _LONGEST_WRITTEN:
        return ""
    if not any(isinstance(part, ast.Name) for part in ast.walk(node)) or any(isinstance(part, ast.Call) for part in ast.walk(node)):
        return ""
    text = ast.unparse(node)
    return text if len(text) <= _LONGEST_NAME else ""


def _nodes(code: str) -> Iterator[ast.AST]:
    """All nodes of a line, which may be the head of a block; none where it is not whole."""
    if len(code) > _LONGEST:
        return
    for text in (code, f"{code} pass", f"if 0: pass\n{code} pass"):
        try:
            yield from ast.walk(ast.parse(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return
