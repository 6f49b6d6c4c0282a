"""Columns as integers: what numpy finds with them is what a loop over the rows finds."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.formats.dump.dump_table import OUTPUT, DumpTable
from msprobe_engine.measure import distances, factorize
from msprobe_engine.measure.segments import SegmentReduce

SHAPES: list[Any] = [[], [1], [2, 3], [2, 4], "(2, 3)", None]
PLACES = (".input.0", ".input.1", ".output.0", ".parameters.weight")


def _side(records: list[list[str]], name: str) -> DumpTable:
    """Records with rows at these places."""
    side = DumpTable(Path(name))
    for number, places in enumerate(records):
        side.ops.append(f"{name}.{number}.forward")
        for place in places:
            side.name.append(side.ops[-1] + place)
            side.op.append(number)
            side.role.append(OUTPUT if "output" in place else 0)
        side.offsets.append(len(side.name))
    return side


@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(SHAPES)), max_size=30))
def test_unequal_is_what_comparing_says(pairs: list[tuple[Any, Any]]) -> None:
    """Equal values count as equal whether they are one object or two; a text is no list."""
    first, second = [one for one, _ in pairs], [list(other) if isinstance(other, list) else other for _, other in pairs]
    rows = np.arange(len(pairs))
    assert factorize.unequal(first, second, rows, rows).tolist() == [a != b for a, b in zip(first, second)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=20))
def test_spread_is_all_ranges(ranges: list[tuple[int, int]]) -> None:
    """One range after the other, empty ones too."""
    starts, counts = np.array(ranges, np.int64).reshape(-1, 2).T
    assert factorize.spread(starts, counts).tolist() == [n for start, count in ranges for n in range(start, start + count)]


PLACES_OF_A_RECORD = st.lists(st.sampled_from(PLACES), max_size=4, unique=True)


@given(st.lists(st.tuples(PLACES_OF_A_RECORD, PLACES_OF_A_RECORD), min_size=1, max_size=8))
def test_rows_are_paired_by_place(records: list[tuple[list[str], list[str]]]) -> None:
    """Rows of matched records belong together when their places and roles are the same, in whatever order they stand."""
    target, golden = _side([one for one, _ in records], "a"), _side([other for _, other in records], "golden")
    rows, starts = distances.paired_rows(target, golden, [(n, n) for n in range(len(records))])
    found = [
        [PLACES.index(target.name[i][len(f"a.{n}.forward") :]) for i, _ in rows[starts[n] : starts[n + 1]]] for n in range(len(records))
    ]
    assert found == [[PLACES.index(place) for place in one if place in other] for one, other in records]
    assert all(target.name[i].partition("forward")[2] == golden.name[j].partition("forward")[2] for i, j in rows)


@given(st.lists(st.lists(st.floats(0, 10), max_size=4), max_size=8))
def test_spans_reduce_per_record(groups: list[list[float]]) -> None:
    """The largest value of each record and the first row that has it; 0 and -1 where there is none above 0."""
    values = np.array([value for group in groups for value in group])
    starts = [0, *accumulate(map(len, groups))]
    sums = SegmentReduce(starts)
    largest = sums.largest(values)
    where = sums.place_of(largest, values)
    assert largest.tolist() == [max(group, default=0.0) for group in groups]
    expected = [start + group.index(max(group)) if group and max(group) > 0 else -1 for start, group in zip(starts, groups)]
    assert where.tolist() == expected
