"""The one entry for JSON that somebody else wrote: whatever is wrong with it becomes one error, and what is let through is safe to use.

Let through are NaN and Infinity, because dumps and monitor files have them. Not let through is what would fail or never end further on:
objects nested deeper than `MAX_DEPTH` (recursion) and integers of more than `MAX_DIGITS` digits (``float()`` of them overflows).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from msprobe_engine.core.errors import TextError

MAX_DEPTH = 200
MAX_DIGITS = 300
"""The largest float has 309."""
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_QUICK_PASSES = 40
_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else byte for byte in range(256))
_TOO_MANY = b"0" * (MAX_DIGITS + 1)

Pairs = Callable[[list[tuple[str, Any]]], Any]


def parse_json(data: bytes | str, pairs: Pairs | None = None, *, levels: int = MAX_DEPTH) -> Any:
    """Plain data of JSON text.

    Args:
        data: UTF-8 (also UTF-16 and UTF-32, which JSON allows), or text.
        pairs: makes an object of its keys and values, see `json.loads`; `unique_keys` is one.
        levels: of nesting that are allowed.

    Raises:
        TextError: it is no JSON, or beyond the limits.
    """
    try:
        raw = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
        if _is_too_deep(raw, levels):
            raise TextError(f"it is nested too deeply: {levels} levels are the most")
        # To be called for every integer is dear; most files have no row of digits that is too long, not even in a text.
        digits = _integer if b"\0" in raw[:4] or _TOO_MANY in raw.translate(_DIGITS) else None
        return json.loads(data, object_pairs_hook=pairs, parse_int=digits)
    except TextError:
        raise
    except json.JSONDecodeError as error:
        raise TextError(_syntax(error), line=error.lineno, column=error.colno, at_end=error.pos >= len(error.doc.rstrip()) - 1) from None
    except UnicodeDecodeError as error:
        raise TextError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise TextError("it is nested too deeply") from None
    except ValueError as error:
        raise TextError(" ".join(str(error).split())[:200]) from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; for `parse_json`.

    Raises:
        TextError: a key appears twice, and nobody can say which of the two counts.
    """
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise TextError(f"the key {twice[:120]!r} appears twice")
    return out


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise TextError(f"it holds a number of {len(text)} digits; {MAX_DIGITS} are the most")
    return int(text)


def _syntax(error: json.JSONDecodeError) -> str:
    before = error.doc[: error.pos].rstrip()
    if not error.doc.strip():
        return "the file is empty"
    closing = error.doc[error.pos :].lstrip()[:1]
    if before.endswith(",") and closing in ("}", "]"):
        return f"a comma stands before the closing {closing}"
    return error.msg


def _is_too_deep(data: bytes, levels: int) -> bool:
    """Innermost pairs of brackets are taken away until none is left: for files as they are, a few passes over little text."""
    brackets = data.translate(None, _NO_BRACKETS)
    for _ in range(_QUICK_PASSES):
        fewer = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(fewer) == len(brackets):
            break
        brackets = fewer
    if len(brackets) <= levels:
        return False
    depth = 0  # what is left may stand in texts: now exactly
    for bracket in _TEXT.sub(b"", data).translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > levels:
            return True
    return False


def dumps(value: Any) -> str:
    """One line of JSON. NaN and the infinities are written as ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        return json.dumps(_plain(value, 0), allow_nan=False, separators=(",", ":"))


def number(value: float) -> str:
    """A float64 as JSON, in full."""
    return repr(value) if math.isfinite(value) else '"NaN"' if value != value else '"Infinity"' if value > 0 else '"-Infinity"'


def _plain(value: Any, depth: int) -> Any:
    if depth > 20:
        return "..."
    if isinstance(value, float):
        return value if math.isfinite(value) else json.loads(number(value))
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if isinstance(value, dict):
        return {str(k): _plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v, depth + 1) for v in value]
    return str(value)
