"""Longest common subsequence of two sequences of keys, in time that grows with how much they differ.

Greedy algorithm of E. Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1 (1986): N elements and D differences cost
N + D^2, so two runs of a million calls that differ in a hundred are aligned in a second. Beyond `MOST` differences in one stretch the
rest of it is paired by how often each key has come, which is linear.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

MOST = 2000
"""Differences in one stretch up to which the longest common subsequence is looked for."""

Pair = tuple[int, int]


def align(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[Pair]:
    """Pairs (i, j) with ``first[i] == second[j]``, ascending in both."""
    low = 0
    n, m = len(first), len(second)
    while low < n and low < m and first[low] == second[low]:
        low += 1
    high = 0
    while high < n - low and high < m - low and first[n - 1 - high] == second[m - 1 - high]:
        high += 1
    pairs = [(i, i) for i in range(low)]
    if low < n - high and low < m - high:
        found = _middle(first[low : n - high], second[low : m - high])
        pairs += [(i + low, j + low) for i, j in found]
    pairs += [(n - k, m - k) for k in range(high, 0, -1)]
    return pairs


def gaps(pairs: Sequence[Pair], n: int, m: int) -> list[tuple[range, range]]:
    """What lies between aligned elements, where both sides have something."""
    found = []
    i = j = 0
    for a, b in [*pairs, (n, m)]:
        if a > i and b > j:
            found.append((range(i, a), range(j, b)))
        i, j = a + 1, b + 1
    return found


def _middle(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[Pair]:
    common = set(first) & set(second)
    if not common:
        return []
    # what only one side has costs a difference each and can never match
    left = [i for i, key in enumerate(first) if key in common]
    right = [j for j, key in enumerate(second) if key in common]
    numbers = {key: number for number, key in enumerate(common)}
    a, b = [numbers[first[i]] for i in left], [numbers[second[j]] for j in right]
    found = _myers(a, b)
    if found is None:
        found = _by_count(a, b)
    return [(left[i], right[j]) for i, j in found]


def _myers(a: list[int], b: list[int]) -> list[Pair] | None:
    n, m = len(a), len(b)
    history: list[array[int]] = []  # of each number of differences: how far one gets on the diagonals -d, -d + 2, ... d
    before = array("i", [0])
    for d in range(min(n + m, MOST) + 1):
        now = array("i", bytes(4 * (d + 1)))
        for i in range(d + 1):
            if d == 0:
                x = 0
            elif i == 0 or (i != d and before[i - 1] < before[i]):
                x = before[i]
            else:
                x = before[i - 1] + 1
            y = x - (2 * i - d)
            while x < n and y < m and a[x] == b[y]:
                x += 1
                y += 1
            now[i] = x
            if x >= n and y >= m:
                history.append(now)
                return _back(history, n, m)
        history.append(now)
        before = now
    return None


def _back(history: list[array[int]], n: int, m: int) -> list[Pair]:
    pairs: list[Pair] = []
    x, y = n, m
    for d in range(len(history) - 1, 0, -1):
        before = history[d - 1]
        i = (x - y + d) // 2
        down = i == 0 or (i != d and before[i - 1] < before[i])
        start = before[i] if down else before[i - 1]
        diagonal = x - y + (1 if down else -1)
        first = start if down else start + 1
        while x > first:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = start, start - diagonal
    while x > 0 and y > 0:
        x, y = x - 1, y - 1
        pairs.append((x, y))
    pairs.reverse()
    return pairs


def _by_count(a: list[int], b: list[int]) -> list[Pair]:
    """The k-th of a key with the k-th of the same key, as far as that crosses nothing."""
    places: dict[int, list[int]] = {}
    for j, key in enumerate(b):
        places.setdefault(key, []).append(j)
    taken: dict[int, int] = {}
    pairs, last = [], -1
    for i, key in enumerate(a):
        count = taken.get(key, 0)
        options = places[key]
        while count < len(options) and options[count] <= last:
            count += 1
        if count < len(options) and options[count] - last <= 4 * (i + 8):
            last = options[count]
            pairs.append((i, last))
            count += 1
        taken[key] = count
    return pairs
