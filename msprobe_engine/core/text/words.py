"""Lists, long texts, counts and sizes for people."""

from __future__ import annotations

from collections.abc import Sequence


def some(items: Sequence[object], most: int = 8) -> str:
    """``a, b and 3 more``."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most:,} more" if len(items) > most else "")


def shorten_text(text: str, most: int = 60) -> str:
    """The beginning of a text that is too long for a line."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def many(count: int, what: str) -> str:
    """``1 step``, ``1,234 steps``."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def size(count: float) -> str:
    """``1.2 MB``: bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
