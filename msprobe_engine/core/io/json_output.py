"""JSON that every reader takes: numbers that JSON does not have are texts, and what JSON cannot hold is shown as text."""

from __future__ import annotations

import json
import math
from typing import Any


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
