"""Rows matched by name without the call number, in one pass over both sides and never backwards (``-f``, ``-fm``).

Both sides wait in a queue each. When the newest row of one side equals one that waits on the other, they are matched, and all that waited
before them on either side stays without a partner. The existing tool looks through the queues one by one; here a table of what waits makes
the pass linear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msprobe_engine.align.calls.row_names import Keys
from msprobe_engine.align.calls.row_order import Pairs


def without_call(name: str) -> str:
    """The row name without what stands before ``.forward`` or ``.backward``: the call number of a function, the class of a module."""
    word = "forward" if "forward" in name else "backward"
    if word not in name:
        return name
    parts = name.split(word)
    return f"{parts[0].rsplit('.', 2)[0]}.{word}{parts[1]}"


def joined(keys: Keys, shapes: Sequence[str], golden_shapes: Sequence[str], shaped: bool, compat: bool) -> Pairs:
    """Match.

    Args:
        keys: row names, one per row.
        shapes, golden_shapes: shapes as texts, by row.
        shaped: shapes must be equal too (8.1.1).
        compat: rows of the target behind the end of the golden side are left out when nothing waits there, as the existing tool does.
    """
    a = [(without_call(str(key)), shapes[i] if shaped else "") for i, key in zip(keys.rows, keys.target)]
    b = [(without_call(str(key)), golden_shapes[j] if shaped else "") for j, key in zip(keys.golden_rows, keys.golden)]
    pairs = Pairs()
    first, second = _Queue(a), _Queue(b)
    for at in range(max(len(a), len(b))):
        first.push(at)
        second.push(at)
        if first.empty != second.empty:
            break
        if first.empty:
            continue
        found = second.earliest(a[first.end - 1])
        i, j = first.end - 1, found
        if found < 0:
            i, j = first.earliest(b[second.end - 1]), second.end - 1
        if i < 0:
            continue
        for skipped in range(first.start, i):
            pairs.add(keys.rows[skipped], -1)
        pairs.add(keys.rows[i], keys.golden_rows[j])
        first.start, second.start = i + 1, j + 1
    for rest in range(first.start, first.end if compat else len(a)):
        pairs.add(keys.rows[rest], -1)
    return pairs


class _Queue:
    """Positions ``start ... end - 1`` of a list of keys."""

    def __init__(self, keys: Sequence[tuple[str, str]]) -> None:
        self._keys = keys
        self._places: dict[tuple[str, str], deque[int]] = {}
        self.start = self.end = 0

    @property
    def empty(self) -> bool:
        return self.start == self.end

    def push(self, at: int) -> None:
        """Take the next one in, if there is one."""
        if at < len(self._keys):
            self._places.setdefault(self._keys[at], deque()).append(at)
            self.end = at + 1

    def earliest(self, key: tuple[str, str]) -> int:
        """The first that waits with this key, or -1."""
        places = self._places.get(key)
        while places and places[0] < self.start:
            places.popleft()
        return places[0] if places else -1
