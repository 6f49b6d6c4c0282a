"""What one rank tells the others: an incident has begun. Plain JSON, checked on arrival because it comes over the network."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import UsageError

VERSION = 1
"""Steps between the step that raised the alert and the first step that all ranks capture."""
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}")
_LIMIT = 1 << 48


@dataclass(frozen=True)
class Event:
    """An incident as announced.

    Attributes:
        id: name of the incident directory, from step and rule: the same on every rank that sees the same thing.
        step: step in which the rule fired.
        capture_step: first step to capture, on all ranks.
        message: the alert's line.
    """

    id: str
    step: int
    rule: str
    rank: int
    capture_step: int
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> Event:
        """Check a received event.

        Raises:
            UsageError: not an event; the message says which field is wrong.
        """
        if not isinstance(value, Mapping):
            raise UsageError(f"incident event: expected an object, got {type(value).__name__}")
        name, rule, message = value.get("id"), value.get("rule"), value.get("message", "")
        if not isinstance(name, str) or not _ID.fullmatch(name) or ".." in name:
            raise UsageError(f"incident event: id {str(name)[:80]!r} is not a plain directory name")
        if not isinstance(rule, str) or not isinstance(message, str):
            raise UsageError(f"incident event {name}: rule and message must be text")
        numbers = {}
        for key in ("step", "rank", "capture_step"):
            number = value.get(key)
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < _LIMIT:
                raise UsageError(f"incident event {name}: {key} is {number!r}, expected a whole number from 0")
            numbers[key] = number
        return cls(name, numbers["step"], rule[:80], numbers["rank"], numbers["capture_step"], message[:500])

    @classmethod
    def of(cls, alert: Alert, *, now: int, lead: int) -> Event:
        """The event that an alert starts.

        Args:
            now: last step that has ended on this rank; equal to the alert's step or, when rows arrive late, after it.
            lead: steps until all ranks know of it (`notify.Notifier`).
        """
        rule = re.sub(r"[^A-Za-z0-9_-]+", "_", alert.rule)
        return cls(f"step{alert.step}-{rule}"[:120], alert.step, alert.rule, alert.rank, max(now, alert.step) + lead, alert.message[:500])


def plain(value: Any) -> Any:
    """Strict JSON: NaN and infinities as the strings "NaN", "Infinity", "-Infinity"; unknown objects as text."""
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(child) for child in value]
    return str(value)
