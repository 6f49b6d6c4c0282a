"""What of two matched records only one side has: a row, or of two rows that belong together a statistic that is a number there and null,
text or no key here, a dtype, a shape, a checksum, a saved tensor, any value. The rest is compared, so they may differ where nobody could
look; that is said and counted, never "the same".

What recorders leave out by design is no loss (`dump_dialects.has_all_statistics`); memory that nobody has written (``uninitialised``) or
that a call does not read (``ignored``) has no numbers in dumps of this tool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import is_bool, is_not_float
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.dump_table import STRUCTURE, TENSOR, DumpTable, is_number
from msprobe_engine.measure import dump_dialects, factorize

Bools = npt.NDArray[np.bool_]

WHAT = (
    "Max",
    "Min",
    "Mean",
    "Norm",
    "true_count",
    "dtype",
    "checksum",
    "redacted values",
    "shape",
    "a saved tensor",
    "a value",
    "no number",
)
"""Columns of what `on_one_side` returns. `REDACTED`: values that were left out, and no digests of one key. `NOWHERE`: neither side has a
number or a checksum; `measure` knows."""
REDACTED, NOWHERE = 7, 11
NUMBERS = slice(0, 5)
_STATISTICS, _TRUES, _DTYPE, _CHECKSUM, SHAPE, _FILE, _VALUE = slice(0, 4), 4, 5, 6, 8, 9, 10
_NOT_BY_ALL = slice(2, 4)
_NO_VALUES = frozenset(("ignored", "uninitialised"))
_NO_TYPE = str(type(None))
UNSEARCHED = "{0}: {1} records have a tensor without numbers, which was not searched for NaN and Inf; the first is {2}"


def on_one_side(
    target: DumpTable, golden: DumpTable, left: factorize.Integers, right: factorize.Integers, elements: factorize.Integers
) -> Bools:
    """Which of `WHAT` only one side has.

    Args:
        left, right: int64 (n,), rows of both sides.
        elements: int64 (n,), of the tensors.

    Returns:
        bool (n, 12).
    """
    found = np.zeros((len(left), len(WHAT)), bool)
    if target.nonfloat_stats or golden.nonfloat_stats:
        found[:, _STATISTICS] = _find_missing_statistics(target)[left] ^ _find_missing_statistics(golden)[right]
        if dump_dialects.differ(target, golden) or target.framework != golden.framework:
            known = factorize.of_each(golden.dtype, dump_dialects.has_all_statistics, bool)[right]
            found[~known, _NOT_BY_ALL] = False
        bools = [factorize.of_each(side.dtype, is_bool, bool)[rows] for side, rows in ((target, left), (golden, right))]
        found[bools[0] != bools[1], _STATISTICS] = False  # two forms of a mask
    plain_a, plain_b = factorize.mask(target.values, len(target))[left], factorize.mask(golden.values, len(golden))[right]
    found[plain_a | plain_b] = False
    for at in np.flatnonzero(plain_a ^ plain_b).tolist():
        side, row = (target, int(left[at])) if plain_a[at] else (golden, int(right[at]))
        found[at, _DTYPE] = side.values[row] is None and side.dtype[row] == _NO_TYPE
    if any(target.md5) and any(golden.md5):
        without = [np.fromiter((md5 is None for md5 in side.md5), bool, len(side)) for side in (target, golden)]
        found[:, _CHECKSUM] = (without[0][left] ^ without[1][right]) & ~plain_a & ~plain_b
    found[(_find_rows_without_values(target)[left] | _find_rows_without_values(golden)[right]) | (elements == 0)] = False
    tensors = ~plain_a & ~plain_b & factorize.of_each(target.dtype, bool, bool)[left] & factorize.of_each(golden.dtype, bool, bool)[right]
    found[:, SHAPE] = tensors & (_without(target.shape)[left] ^ _without(golden.shape)[right])
    if target.mode == golden.mode == TENSOR:
        found[:, _FILE] = tensors & (_without(target.data_name)[left] ^ _without(golden.data_name)[right])
    if not dump_dialects.differ(target, golden):
        bools = factorize.of_each(target.dtype, is_bool, bool)[left] & factorize.of_each(golden.dtype, is_bool, bool)[right]
        found[:, _TRUES] = bools & (np.isnan(target.stats[left, 3]) ^ np.isnan(golden.stats[right, 3]))
    found[:, _VALUE] = (_empty(target)[left] ^ _empty(golden)[right]) & ~found[:, _DTYPE]
    return found


def half_finite(
    target: DumpTable,
    golden: DumpTable,
    left: factorize.Integers,
    right: factorize.Integers,
    a: npt.NDArray[np.float64],
    b: npt.NDArray[np.float64],
) -> Bools:
    """Which pairs of rows have a mean or a norm that is NaN or Inf on one side and a finite number on the other. Two recorders or
    frameworks do not sum alike.

    Args:
        a, b: float64 (n, 4), the statistics of the rows.
    """
    unlike = np.isfinite(a[:, 2:]) != np.isfinite(b[:, 2:])
    if not unlike.any() or dump_dialects.differ(target, golden) or target.framework != golden.framework:
        return np.zeros(len(left), bool)
    return np.asarray((unlike & ~_find_missing_statistics(target)[left, 2:] & ~_find_missing_statistics(golden)[right, 2:]).any(1))


def alone(
    target: DumpTable, golden: DumpTable, pairs: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Rows of matched records that have no partner, of both sides, as `with_content` has them.

    Args:
        pairs: matched records.
        rows: rows that belong together.
    """
    found = []
    for k, side in enumerate((target, golden)):
        first, ops = factorize.firsts(side), np.array([pair[k] for pair in pairs], np.int64)
        mine = factorize.mask(factorize.spread(first[ops], first[ops + 1] - first[ops]), len(side))
        mine[[row[k] for row in rows]] = False
        found.append(np.flatnonzero(mine).tolist())
    return with_content(target, golden, found[0], found[1])


def with_content(
    target: DumpTable, golden: DumpTable, only_target: Iterable[int], only_golden: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Of rows without a partner those whose loss is one: nulls hold nothing, and two recorders or frameworks have rules of their own of
    what they write."""
    if dump_dialects.differ(target, golden) or target.framework != golden.framework:
        return [], []
    left, right = _empty(target), _empty(golden)
    return [row for row in only_target if not left[row]], [row for row in only_golden if not right[row]]


def expects_numbers(
    target: DumpTable, golden: DumpTable, left: factorize.Integers, right: factorize.Integers, elements: factorize.Integers
) -> Bools:
    """Which pairs of rows are tensors with elements that somebody has written, in dumps that have numbers."""
    if STRUCTURE in (target.mode, golden.mode) or dump_dialects.differ(target, golden) or target.framework != golden.framework:
        return np.zeros(len(left), bool)
    tensors = factorize.of_each(target.dtype, bool, bool)[left] & factorize.of_each(golden.dtype, bool, bool)[right]
    return np.asarray(tensors & (elements > 0) & ~_find_rows_without_values(target)[left] & ~_find_rows_without_values(golden)[right])


def say_unsearched(side: DumpTable) -> None:
    """Say which records of one dump have a tensor with elements whose Max or Min is no number: nobody can tell whether it holds NaN."""
    if side.mode == STRUCTURE or not side.nonfloat_stats:
        return
    kinds = factorize.of_each(side.dtype, lambda dtype: bool(dtype) and not is_not_float(str(dtype)), bool)
    rows = np.flatnonzero(
        _find_missing_statistics(side)[:, :2].any(1) & kinds & ~_find_rows_without_values(side) & ~factorize.mask(side.values, len(side))
    ).tolist()
    counted = side.nans.keys() | side.infs.keys()
    ops = dict.fromkeys(side.op[row] for row in rows if row not in counted and not _is_empty(side.shape[row]))
    if ops:
        side.add_problem(Sentence(UNSEARCHED, side.path, f"{len(ops):,}", side.ops[next(iter(ops))][:120]))


def _empty(side: DumpTable) -> Bools:
    """bool (rows,): nulls."""
    found = np.fromiter((dtype is None for dtype in side.dtype), bool, len(side))
    found[[row for row, value in side.values.items() if value is None]] = True
    return found


def words(row: Bools) -> str:
    """Why one row of `on_one_side` was not compared whole."""
    if row[REDACTED]:
        return "values are redacted, and there are no digests of one key"
    if row[NOWHERE]:
        return "neither side has a number"
    return f"only one side has {' and '.join(what for what, missing in zip(WHAT, row.tolist()) if missing)}"


def sentences(
    target: DumpTable, golden: DumpTable, found: Bools, only_target: Sequence[int] = (), only_golden: Sequence[int] = ()
) -> Iterator[Sentence]:
    """How many rows lack what, and what the dumps hold where that is not the same; nothing where all is on both sides.

    Args:
        found: as `on_one_side` has it.
        only_target, only_golden: rows without a partner.
    """
    if target.mode != golden.mode and not dump_dialects.differ(target, golden):
        template = "{0} holds {1}, {2} holds {3}: only what both hold was compared"
        yield Sentence(template, target.path, target.mode, golden.path, golden.mode)
    for side, other, rows in ((target, golden, only_target), (golden, target, only_golden)):
        if len(rows) == 1:
            yield Sentence("{0}: 1 row is not in {1} and was not compared: {2}", side.path, other.path, side.name[rows[0]])
        elif len(rows):
            template = "{0}: {1} rows are not in {2} and were not compared, the first is {3}"
            yield Sentence(template, side.path, f"{len(rows):,}", other.path, side.name[rows[0]])
    template = "{0} against {1}: {2} rows have {3} on one side only; of them only the rest was compared"
    single = "{0} against {1}: 1 row has {2} on one side only; of it only the rest was compared"
    hidden = int(found[:, REDACTED].sum())
    if hidden:
        yield Sentence(
            "{0} against {1}: {2} rows hold redacted values without digests of one key on both sides; they cannot be compared",
            target.path,
            golden.path,
            f"{hidden:,}",
        )
    nowhere = int(found[:, NOWHERE].sum())
    if nowhere == 1:
        yield Sentence("{0} against {1}: 1 row has no number on either side; it cannot be compared", target.path, golden.path)
    elif nowhere:
        many = "{0} against {1}: {2} rows have no number on either side; they cannot be compared"
        yield Sentence(many, target.path, golden.path, f"{nowhere:,}")
    for at, (what, count) in enumerate(zip(WHAT, found.sum(0).tolist())):
        if at in (REDACTED, NOWHERE):
            continue
        if count == 1:
            yield Sentence(single, target.path, golden.path, what)
        elif count:
            yield Sentence(template, target.path, golden.path, f"{count:,}", what)


def _is_empty(shape: Any) -> bool:
    return isinstance(shape, list) and 0 in shape


def _find_missing_statistics(side: DumpTable) -> Bools:
    """bool (rows, 4): no number, not even NaN."""
    found = np.zeros((len(side), 4), bool)
    for row, four in side.nonfloat_stats.items():
        found[row] = [not is_number(value) for value in four]
    return found


def _without(column: Sequence[Any]) -> Bools:
    return np.fromiter((not value and value != [] for value in column), bool, len(column))


def _find_rows_without_values(side: DumpTable) -> Bools:
    return factorize.mask([row for row, facts in side.extra.items() if not _NO_VALUES.isdisjoint(facts)], len(side))
