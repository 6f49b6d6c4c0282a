"""Settings that a reinforcement-learning framework prints when it starts, out of its log: verl (a dictionary), slime (Megatron's table).

Logs are read line by line, so their size does not matter; what is taken out of them is bounded.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.json_text import parse_json

MAX_LINE = 1 << 20
MAX_TEXT = 4 << 20
MAX_VALUES = 50_000
MAX_DEPTH = 60
_VERL_START = re.compile(r"\{\s*['\"]actor_rollout_ref['\"]\s*:")
_VERL_FIRST = re.compile(r"\s*['\"]actor_rollout_ref['\"]\s*:")
_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SLIME_BEGIN = re.compile(r"-{5,} arguments -{5,}\s*$")
_SLIME_END = re.compile(r"-{5,} end of arguments -{5,}\s*$")
_SLIME_ROW = re.compile(r"([A-Za-z_][\w.-]*) \.{2,}(?: (.*))?$")
_PIECES = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[][(){}]|[^][(){}'"]+|['"]""", re.DOTALL)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line, without colours; overlong lines are cut.

    Raises:
        DumpFormatError: the log is missing or no regular file.
    """
    try:
        with open_input(path) as file:
            number, cut = 0, False
            while raw := file.readline(MAX_LINE):
                if not cut:
                    number += 1
                    yield number, _COLOR.sub("", raw.decode("utf-8", "replace")).rstrip("\r\n")
                cut = not raw.endswith(b"\n")
    except OSError as error:
        raise DumpFormatError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_verl(path: str | Path) -> dict[str, Any]:
    """The last settings that verl printed into a log, nested as it prints them.

    What stands before the dictionary in its first line (such as Ray's ``(TaskRunner pid=1)``) stands before each of its lines; lines
    without it come from other processes and are passed over.

    Raises:
        DumpFormatError: there are none, or they are not whole.
    """
    path = Path(path)
    last: tuple[int, dict[str, Any]] | None = None
    damaged = ""
    start, prefix, parts, open_brackets, size = 0, "", [""], 0, 0
    before = ""
    for number, line in _lines(path):
        begin = _VERL_START.search(line)
        opening, before = before.rstrip(), line
        if opening.endswith("{") and line.startswith(opening[:-1].rstrip()) and _VERL_FIRST.match(line[len(opening[:-1].rstrip()) :]):
            start, prefix, parts, open_brackets, size = number - 1, opening[:-1], ["{"], 1, 0  # JSON has its bracket in a line of its own
            line = line[len(prefix.rstrip()) :]
        elif begin is not None:
            damaged = f"the settings that begin in line {start} do not end" if start else damaged
            start, prefix, parts, open_brackets, size = number, line[: begin.start()], [], 0, 0
            line = line[begin.start() :]
        elif not start or (prefix.strip() and not line.startswith(prefix.rstrip())):
            continue
        else:
            line = line[len(prefix.rstrip()) :]
        size += len(line)
        if size > MAX_TEXT:
            damaged, start = f"the settings that begin in line {start} are longer than {MAX_TEXT} characters", 0
            continue
        text, open_brackets = _up_to_end(line, open_brackets)
        parts.append(text)
        if open_brackets <= 0:
            try:
                last, damaged = (start, _dictionary("\n".join(parts))), ""
            except ValueError as error:
                damaged = f"the settings that begin in line {start} are no plain dictionary: {error}"
            start = 0
    if start:
        damaged = f"the settings that begin in line {start} do not end"
    if damaged:
        raise DumpFormatError(f"{path}: {damaged}")
    if last is None:
        raise DumpFormatError(f"{path}: no settings of verl in this log; they begin with {{'actor_rollout_ref': ...")
    return last[1]


def _up_to_end(line: str, open_brackets: int) -> tuple[str, int]:
    """The line up to the bracket that closes the first one, and how many are open behind it; quoted brackets do not count."""
    end = 0
    for match in _PIECES.finditer(line):
        end = match.end()
        if match[0] in "([{":
            open_brackets += 1
        elif match[0] in ")]}":
            open_brackets -= 1
            if not open_brackets:
                return line[:end], 0
    return line, open_brackets


def _dictionary(text: str) -> dict[str, Any]:
    """A printed dictionary, of Python or JSON.

    Raises:
        ValueError: it is none.
    """
    try:
        tree = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
        try:
            tree = parse_json(text)
        except ValueError:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(reason) from None
    if not isinstance(tree, dict):
        raise ValueError("it is no dictionary")
    return tree


def flat_settings(tree: Any) -> dict[str, Any]:
    """Nested settings with keys joined by ``/``; lists are one value, an empty section is ``{}``. Keys that are joined already stay.

    Raises:
        DumpFormatError: more than 50,000 values or 60 levels.
    """
    out: dict[str, Any] = {}
    stack: list[tuple[str, Any, int]] = [("", tree, 0)]
    while stack:
        prefix, value, depth = stack.pop()
        if depth > MAX_DEPTH or len(out) + len(stack) > MAX_VALUES:
            raise DumpFormatError(f"settings with more than {MAX_VALUES} values or {MAX_DEPTH} levels; is this the right file?")
        if isinstance(value, dict) and (value or not prefix):
            stack.extend((f"{prefix}/{key}" if prefix else str(key), item, depth + 1) for key, item in value.items())
        else:
            out[prefix] = value
    return dict(sorted(out.items()))


def read_slime(path: str | Path) -> dict[str, Any]:
    """The last table of arguments that slime printed into a log (as Megatron prints it).

    Values are bool, int and float where they look so, else text; an empty value is an empty text.

    Raises:
        DumpFormatError: there is none, or it does not end.
    """
    path = Path(path)
    last: dict[str, Any] | None = None
    current: dict[str, Any] | None = None
    start = 0
    for number, line in _lines(path):
        if _SLIME_BEGIN.search(line):
            current, start = {}, number
        elif current is not None and _SLIME_END.search(line):
            last, current = current, None
        elif current is not None and (row := _SLIME_ROW.search(line)) and len(current) < MAX_VALUES:
            current[row[1]] = _value((row[2] or "").strip())
    if current is not None and last is None:
        raise DumpFormatError(f"{path}: the arguments that begin in line {start} do not end")
    if last is None:
        raise DumpFormatError(f"{path}: no arguments of slime in this log; they begin with a line '---- arguments ----'")
    return last


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"[-+]?\d{1,300}", text):
        return int(text)
    if re.fullmatch(r"[-+]?(?:\d+\.\d*|\.?\d+)(?:[eE][-+]?\d{1,5})?|[-+]?(?:inf|nan)", text):
        return float(text)
    return text
