"""Call stacks at the price of a dictionary look-up: frames are told apart by code object and instruction, texts are made once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from msprobe_engine.core.redaction import source_line

Walk = Callable[[FrameType | None, FrameType | None, dict[CodeType, bool], Callable[[CodeType], bool], int], tuple[tuple[Any, ...], bool]]


def walk_python(
    frame: FrameType | None, end: FrameType | None, hidden: dict[CodeType, bool], judge: Callable[[CodeType], bool], tail: int
) -> tuple[tuple[Any, ...], bool]:
    """The key of a stack: (code, instruction) of the frames from `frame` outward, up to `end`.

    Args:
        hidden: which code is left out, filled by `judge`.
        tail: last item of the key when `end` was met.

    Returns:
        the key, and whether `end` was met.
    """
    key: list[Any] = []
    while frame is not end and frame is not None:
        code = frame.f_code
        try:
            hide = hidden[code]
        except KeyError:
            hide = hidden[code] = judge(code)
        if not hide:
            key.append((code, frame.f_lasti))
        frame = frame.f_back
    known = end is not None and frame is end
    if known:
        key.append(tail)
    return tuple(key), known


walk: Walk
try:
    walk = importlib.import_module("msprobe_integrations.common._stackwalk").stack_key
except ImportError:
    walk = walk_python


class Stacks:
    """Interns the call stacks of one process.

    A stack's text has the form of the existing ``stack.json``: ``File {path}, line {n}, in {function}, \\n {source}``, innermost
    frame first. Frames of this package and of the framework's plumbing are left out, so the first line is whose call it is.

    Args:
        hides: is code left out?
    """

    def __init__(self, hides: Callable[[CodeType], bool]) -> None:
        self._hides = hides
        self._ids: dict[tuple[Any, ...], int] = {}
        self._keys: list[tuple[tuple[CodeType, int], ...]] = []
        self._hidden: dict[CodeType, bool] = {}
        self._texts: list[list[str]] = []
        self._lines: dict[tuple[CodeType, int], str] = {}

    def capture(self, frame: FrameType | None, outer: FrameType | None = None, outer_stack: int = -1) -> int:
        """Number of the stack that starts at `frame`.

        Args:
            outer: a frame further out whose own stack is known (that of the enclosing call): the walk may end there.
            outer_stack: its number, -1 when it is not known.
        """
        found, known = walk(frame, outer if outer_stack >= 0 else None, self._hidden, self._hides, outer_stack)
        number = self._ids.get(found)
        if number is None:
            parts = (*found[:-1], *self._keys[outer_stack]) if known else found
            # the same stack may have been met whole or from another enclosing call
            number = self._ids.setdefault(parts, len(self._keys))
            self._ids[found] = number
            if number == len(self._keys):
                self._keys.append(parts)
        return number

    def texts(self) -> list[list[str]]:
        """The lines of all stacks, by number. The list is replaced, not changed, when stacks are added."""
        if len(self._texts) < len(self._keys):
            self._texts = self._texts + [[self._line(part) for part in key] for key in self._keys[len(self._texts) :]]
        return self._texts

    def __len__(self) -> int:
        return len(self._keys)

    def _line(self, part: tuple[CodeType, int]) -> str:
        try:
            return self._lines[part]
        except KeyError:
            code, instruction = part
            number = line_number(code, instruction)
            source = source_line(code.co_filename, number)
            text = self._lines[part] = f"File {code.co_filename}, line {number}, in {code.co_name}, \n {source}"
            return text


def line_number(code: CodeType, instruction: int) -> int:
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
