"""Longest common subsequence of two sequences of keys, in time that grows with how much they differ.

Greedy algorithm of E. Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1 (1986): N elements and D differences cost
N + D^2, so two runs of a million calls that differ in a hundred are aligned in a second. Beyond `MOST` differences the same algorithm
goes stretch by stretch: after `STRETCH` differences the alignment that has come furthest is taken for good but for its end, where it may
still turn out wrong, and the next stretch begins there. That is N + D * STRETCH, and as long as no single edit is longer than a stretch
the result is what the whole would have given, or close to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

MOST = 1000
"""Differences up to which the longest common subsequence is looked for."""

STRETCH = 120
"""Differences of one stretch beyond that."""

Pair = tuple[int, int]


def align(target: Sequence[Hashable], golden: Sequence[Hashable]) -> list[Pair]:
    """Pairs (i, j) with ``first[i] == second[j]``, ascending in both."""
    low = 0
    n, m = len(target), len(golden)
    while low < n and low < m and target[low] == golden[low]:
        low += 1
    high = 0
    while high < n - low and high < m - low and target[n - 1 - high] == golden[m - 1 - high]:
        high += 1
    pairs = [(i, i) for i in range(low)]
    if low < n - high and low < m - high:
        inner = _middle(target[low : n - high], golden[low : m - high])
        pairs += [(i + low, j + low) for i, j in inner]
    pairs += [(n - k, m - k) for k in range(high, 0, -1)]
    return pairs


def gaps(pairs: Sequence[Pair], n: int, m: int) -> list[tuple[range, range]]:
    """What lies between aligned elements, where both sides have something."""
    ranges = []
    i = j = 0
    for next_i, next_j in [*pairs, (n, m)]:
        if next_i > i and next_j > j:
            ranges.append((range(i, next_i), range(j, next_j)))
        i, j = next_i + 1, next_j + 1
    return ranges


def _middle(target: Sequence[Hashable], golden: Sequence[Hashable]) -> list[Pair]:
    common = set(target) & set(golden)
    if not common:
        return []
    # what only one side has costs a difference each and can never match
    target_places = [i for i, key in enumerate(target) if key in common]
    golden_places = [j for j, key in enumerate(golden) if key in common]
    numbers = {key: number for number, key in enumerate(common)}
    target_numbers, golden_numbers = [numbers[target[i]] for i in target_places], [numbers[golden[j]] for j in golden_places]
    return [(target_places[i], golden_places[j]) for i, j in _common(target_numbers, golden_numbers)]


def _common(target: list[int], golden: list[int]) -> list[Pair]:
    """Pairs of a common subsequence: the longest one up to `MOST` differences."""
    history, end = _forward(target, golden, 0, 0, MOST)
    if end is None:
        return _back(history, len(target), len(golden))[0]
    pairs: list[Pair] = []
    x = y = 0
    while x < len(target) and y < len(golden):
        history, end = _forward(target, golden, x, y, STRETCH)
        ahead, turns = _back(history, *(end or (len(target) - x, len(golden) - y)))
        if end is None:
            cut = (len(target), len(golden))
        else:
            cut = turns[len(turns) * 3 // 4]
            cut = (cut[0] + x, cut[1] + y)
        pairs += [(i + x, j + y) for i, j in ahead if i + x < cut[0] and j + y < cut[1]]
        x, y = cut
    return pairs


def _forward(target: list[int], golden: list[int], x0: int, y0: int, most: int) -> tuple[list[array[int]], Pair | None]:
    """Greedy search from (x0, y0). Returns, of each number of differences, how far one gets on the diagonals -d, -d + 2, ... d (counted
    from the start), and where the furthest path is when `most` did not do, None when the end was reached."""
    n, m = len(target) - x0, len(golden) - y0
    history: list[array[int]] = []
    before = array("i", [0])
    for d in range(min(n + m, most) + 1):
        now = array("i", bytes(4 * (d + 1)))
        for i in range(d + 1):
            if d == 0:
                x = 0
            elif i == 0 or (i != d and before[i - 1] < before[i]):
                x = before[i]
            else:
                x = before[i - 1] + 1
            y = x - (2 * i - d)
            while x < n and y < m and target[x + x0] == golden[y + y0]:
                x += 1
                y += 1
            now[i] = x
            if x >= n and y >= m:
                history.append(now)
                return history, None
        history.append(now)
        before = now
    d = len(history) - 1
    ends = [(x, x - (2 * i - d)) for i, x in enumerate(before)]
    return history, max((sum(end), end) for end in ends if end[0] <= n and 0 <= end[1] <= m)[1]


def _back(history: list[array[int]], x: int, y: int) -> tuple[list[Pair], list[Pair]]:
    """The way to (x, y), and where it stood before each of its differences."""
    pairs: list[Pair] = []
    turns: list[Pair] = []
    for d in range(len(history) - 1, 0, -1):
        before = history[d - 1]
        i = (x - y + d) // 2
        down = i == 0 or (i != d and before[i - 1] < before[i])
        start = before[i] if down else before[i - 1]
        diagonal = x - y + (1 if down else -1)
        stop = start if down else start + 1
        while x > stop:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = start, start - diagonal
        turns.append((x, y))
    while x > 0 and y > 0:
        x, y = x - 1, y - 1
        pairs.append((x, y))
    pairs.reverse()
    turns.reverse()
    return pairs, turns
