"""Columns of a side as integers, so that a million rows are compared by numpy and not one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.dump.dump_table import DumpTable

T = TypeVar("T")
Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


_KNOWN: ContextVar[dict[Any, tuple[Any, Any]] | None] = ContextVar("known", default=None)


@contextmanager
def cache_columns() -> Iterator[None]:
    """What is found of the columns of sides is found once, until the end of the block: nothing may change them in it."""
    token = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(token)


def once(columns: tuple[Any, ...], make: Callable[[], T]) -> T:
    """What `make` gives of these very objects; inside of `cache_columns` it is called once."""
    known = _KNOWN.get()
    if known is None:
        return make()
    key = (make.__code__, *map(id, columns))
    hit = known.get(key)
    if hit is None:
        hit = known[key] = (columns, make())  # the objects are kept, so that no other one gets their id
    result: T = hit[1]
    return result


def number_objects(values: Sequence[Any]) -> tuple[Integers, list[Any]]:
    """int64 (n,), a number per object, and the objects by number. A side has one object for all rows of equal dtype or shape."""
    return once((values,), lambda: _number_by_identity(values))


def _number_by_identity(values: Sequence[Any]) -> tuple[Integers, list[Any]]:
    ids = np.fromiter(map(id, values), np.int64, len(values))
    known = dict(zip(ids.tolist(), values))
    keys = np.array(sorted(known), np.int64)
    return np.searchsorted(keys, ids), [known[key] for key in keys.tolist()]


def unequal(target: Sequence[Any], golden: Sequence[Any], target_rows: Integers, golden_rows: Integers) -> Bools:
    """bool (pairs,): where ``target[target_rows] != golden[golden_rows]``, of dtypes or shapes."""
    return unequal_by(_key, target, golden, target_rows, golden_rows)


def unequal_by(
    key: Callable[[Any], Hashable], target: Sequence[Any], golden: Sequence[Any], target_rows: Integers, golden_rows: Integers
) -> Bools:
    """The same, of what `key` makes of them."""
    known: dict[Hashable, int] = {}
    sides = []
    for values, rows in ((target, target_rows), (golden, golden_rows)):
        numbers, objects = number_objects(values)
        words = np.array([known.setdefault(key(item), len(known)) for item in objects] or [0], np.int64)
        sides.append(words[numbers[rows]])
    return np.asarray(sides[0] != sides[1])


def of_each(values: Sequence[Any], function: Any, dtype: Any = np.float64) -> npt.NDArray[Any]:
    """(n,): `function` of every value, called once per object."""
    numbers, objects = number_objects(values)
    return np.array([function(item) for item in objects] or [0], dtype)[numbers]


def mask(rows: Iterable[int], n: int) -> Bools:
    """bool (n,): True at `rows`."""
    marked = np.zeros(n, bool)
    chosen = list(rows)
    if chosen:
        marked[chosen] = True
    return marked


def columns(pairs: Sequence[tuple[int, int]] | Integers) -> tuple[Integers, Integers]:
    """Both halves of pairs of integers, int64 (n,) each."""
    if isinstance(pairs, np.ndarray):
        return pairs[:, 0], pairs[:, 1]
    both = np.fromiter(chain.from_iterable(pairs), np.int64, 2 * len(pairs)).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def firsts(side: DumpTable) -> Integers:
    """int64 (records + 1,): first row of each record, and the number of rows."""
    return np.array(side.offsets, np.int64)


def spread(starts: Integers, counts: Integers) -> Integers:
    """The numbers of all ranges ``starts[k] ... starts[k] + counts[k]``, one range after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.repeat(starts - ends + counts, counts) + np.arange(total))


def pair_rows(target: DumpTable, golden: DumpTable, ops: Integers) -> tuple[Integers, Integers, Integers, Bools]:
    """Rows of matched records, where both have the same places (``.input.0``, ``.output.1``) in the same order.

    Args:
        ops: int64 (m, 2), record of the target and of the golden side.

    Returns:
        int64 rows of the target and of the golden side; int64 (m + 1,), where each pair of records begins among them; bool (m,), the
        pairs of records whose places are others: they have no rows here.
    """
    target_begin, golden_begin = firsts(target)[ops[:, 0]], firsts(golden)[ops[:, 1]]
    counts = firsts(target)[ops[:, 0] + 1] - target_begin
    apart = counts != firsts(golden)[ops[:, 1] + 1] - golden_begin
    counts = np.where(apart, 0, counts)
    target_rows, golden_rows = spread(target_begin, counts), spread(golden_begin, counts)
    target_places, golden_places = once((target.name, golden.name), lambda: _places_of_both(target, golden))
    differ = target_places[target_rows] != golden_places[golden_rows]
    if differ.any():
        of_pair = np.repeat(np.arange(len(ops)), counts)
        apart[of_pair[differ]] = True
        kept = ~apart[of_pair]
        target_rows, golden_rows, counts = target_rows[kept], golden_rows[kept], np.where(apart, 0, counts)
    return target_rows, golden_rows, np.concatenate(([0], np.cumsum(counts))), apart


def _places_of_both(target: DumpTable, golden: DumpTable) -> tuple[Integers, Integers]:
    known: dict[str, int] = {}
    return _places(target, known), _places(golden, known)


def _places(side: DumpTable, known: dict[str, int]) -> Integers:
    """int64 (rows,): a number per text behind the record's name; `known` is shared by the sides."""
    cuts = np.array(list(map(len, side.ops)) or [0], np.int64)[np.array(side.op, np.int64)].tolist() if len(side) else []
    number = known.setdefault
    numbers = np.fromiter([number(name[cut:], len(known)) for name, cut in zip(side.name, cuts)], np.int64, len(side))
    for row, place in side.positions.items():
        numbers[row] = number(place, len(known))
    return numbers


def _key(value: Any) -> Hashable:
    return (True, *value) if isinstance(value, list) else (False, value)
