"""The last line of a run."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.text.words import size
from msprobe_engine.formats.dump.writing.tally import Steps, Tally


@given(st.lists(st.integers(0, 60)))
def test_steps(numbers: list[int]) -> None:
    """The number and the ranges are those of the set, whatever the order; ranges do not touch; the rest of many is three dots."""
    for order in (numbers, sorted(numbers)):
        steps = Steps()
        for n in order:
            steps.add(n)
        assert steps.count == len(set(numbers))
        pairs = [(int(a), int(b or a)) for a, b in re.findall(r"(\d+)(?:-(\d+))?", str(steps))]
        shown = [n for a, b in pairs for n in range(a, b + 1)]
        assert shown == sorted(shown)
        assert set(shown) == set(numbers) if "..." not in str(steps) else set(shown) < set(numbers)
        assert all(a > b + 1 for (_, b), (a, _) in itertools.pairwise(pairs))


def test_many_steps() -> None:
    """Every tenth of a million steps takes little memory, and all are counted."""
    steps = Steps()
    for n in range(0, 100_000, 10):
        steps.add(n)
    assert steps.count == 10_000
    assert str(steps) == "0, 10, 20, 30, 40, 50, 60, 70, ..."
    assert len(steps._ranges) == Steps.MOST


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_550_000, "2.5 MB"), (10**9, "1.0 GB"), (3 * 10**15, "3000.0 TB")]
)
def test_size(count: int, text: str) -> None:
    """Decimal units."""
    assert size(count) == text


def test_text() -> None:
    """Counts in words, one and many; losses and what was left out by name; saved tensors when there are some."""
    tally = Tally()
    assert tally.text("out") == "0 steps, 0 records, 0 files, 0 B in out"
    tally.wrote(3, 1, [5])
    assert tally.text("out") == "1 step (3), 1 record, 1 file, 5 B in out"
    tally.wrote(4, 1999, [1000, 2000])
    tally.lose({"b": 2})
    tally.lose({"b": 1, "a": 1})
    tally.skip("calls")
    assert tally.text("out", (2, 3000), {"frames": 7}) == (
        "2 steps (3-4), 2,000 records, 3 files, 3.0 kB, 2 saved tensors, 3.0 kB in out; lost: a 1, b 3, frames 7; left out: calls 1"
    )
