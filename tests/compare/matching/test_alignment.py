"""Alignment of two sequences: it pairs equal keys only, crosses nothing, and is as long as it can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.align.calls import longest_common as module
from msprobe_engine.align.calls.longest_common import align, gaps

KEYS = st.lists(st.integers(0, 4), max_size=14)


def longest(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common subsequence, by the table everybody knows."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def holds(a: Sequence[int], b: Sequence[int], pairs: Sequence[tuple[int, int]]) -> None:
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < n for (i, j), (k, n) in itertools.pairwise(pairs))


@given(KEYS, KEYS)
def test_longest(a: list[int], b: list[int]) -> None:
    """The alignment is a longest common subsequence."""
    pairs = align(a, b)
    holds(a, b, pairs)
    assert len(pairs) == longest(a, b)


@given(KEYS, KEYS)
def test_too_different(a: list[int], b: list[int]) -> None:
    """Beyond the limit of differences it is a common subsequence still, and equal ends are found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST", 1)
        patch.setattr(module, "STRETCH", 4)
        pairs = align(a, b)
    holds(a, b, pairs)
    if a == b:
        assert len(pairs) == len(a)


@given(KEYS, KEYS)
def test_gaps(a: list[int], b: list[int]) -> None:
    """Gaps hold what no pair holds, where both sides have some; together with the pairs nothing of it is lost or twice."""
    pairs = align(a, b)
    left = [i for first, _ in gaps(pairs, len(a), len(b)) for i in first]
    right = [j for _, second in gaps(pairs, len(a), len(b)) for j in second]
    assert not set(left) & {i for i, _ in pairs}
    assert not set(right) & {j for _, j in pairs}
    assert left == sorted(set(left))
    assert right == sorted(set(right))


def test_long() -> None:
    """A hundred thousand calls of which twenty differ."""
    a = [i % 30 for i in range(100_000)]
    b = list(a)
    for place in range(2_000, 42_000, 2_000):
        b.insert(place, 99)
    assert len(align(a, b)) == len(a)


def test_many_edits_far_apart() -> None:
    """More differences than are looked for at once cost nothing when they are far apart: every unchanged element is found."""
    a = [n * n % 97 for n in range(20_000)]
    b = [key for n, key in enumerate(a) for key in ([key, 200] if n % 9 == 4 else [key])]
    assert len(b) - len(a) > module.MOST
    assert len(align(a, [5 if key == 200 else key for key in b])) >= len(a) - 5
    assert len(align(a, b)) == len(a)
