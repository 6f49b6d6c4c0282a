"""Ranks and steps as text, neighbours put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MOST = 8
"""Ranges that are listed; the others are counted."""


def ranges_of(numbers: Sequence[int]) -> list[str]:
    """Ascending numbers as ``["0-3", "8"]``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return [str(low) if low == high else f"{low}-{high}" for low, high in spans]


def numbers_in(ranges: Sequence[str]) -> int:
    """How many numbers ``["0-3", "8"]`` stands for."""
    return sum(int(last or first) - int(first) + 1 for first, _, last in (text.partition("-") for text in ranges))


def format_ranges(numbers: Iterable[int]) -> str:
    """``0-3, 8``: all of them."""
    return ", ".join(ranges_of(sorted(numbers)))


def in_short(numbers: Iterable[int]) -> str:
    """`few_ranges` of numbers in any order."""
    return few_ranges(ranges_of(sorted(numbers)))


def few_ranges(ranges: Sequence[str]) -> str:
    """``0-3, 8``; of many ranges the first ones and how many numbers there are."""
    return ", ".join(ranges[:_MOST]) + (f", ... ({numbers_in(ranges):,} in all)" if len(ranges) > _MOST else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-3, 8``."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(ranges_of(ranks))}"


def steps_text(steps: Sequence[int]) -> str:
    """``step 3`` or ``steps 0-3, 8``; of many ranges the first ones and the last step."""
    ranges = ranges_of(steps)
    text = ", ".join(ranges[:_MOST]) + (f", ... {steps[-1]}, {len(steps):,} in all" if len(ranges) > _MOST else "")
    return f"step {text}" if len(steps) == 1 else f"steps {text}"
