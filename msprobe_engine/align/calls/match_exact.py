"""Rows joined by equal keys, as a left join of tables is: each row of the target with every row of the golden side of its key."""

from __future__ import annotations

from msprobe_engine.align.calls.row_names import Keys
from msprobe_engine.align.calls.row_order import Pairs


def joined(keys: Keys, keep_order: bool) -> Pairs:
    """Join.

    Args:
        keys: one per row.
        keep_order: rows of equal keys stay where they are (26.2.0 and data mappings); else they stand together, where the first of them
            is (8.1.1).
    """
    places: dict[object, list[int]] = {}
    for j, key in zip(keys.golden_rows, keys.golden):
        places.setdefault(key, []).append(j)
    pairs = Pairs()
    if keep_order:
        for i, key in zip(keys.rows, keys.target):
            for j in places.get(key, (-1,)):
                pairs.add(i, j)
        return pairs
    groups: dict[object, list[int]] = {}
    for i, key in zip(keys.rows, keys.target):
        groups.setdefault(key, []).append(i)
    for key, rows in groups.items():
        for i in rows:
            for j in places.get(key, (-1,)):
                pairs.add(i, j)
    return pairs
