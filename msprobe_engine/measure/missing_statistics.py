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
    target: DumpTable, golden: DumpTable, target_rows: factorize.Integers, golden_rows: factorize.Integers, elements: factorize.Integers
) -> Bools:
    """Which of `WHAT` only one side has.

    Args:
        target_rows, golden_rows: int64 (n,), rows of both sides.
        elements: int64 (n,), of the tensors.

    Returns:
        bool (n, 12).
    """
    one_sided = np.zeros((len(target_rows), len(WHAT)), bool)
    if target.nonfloat_stats or golden.nonfloat_stats:
        one_sided[:, _STATISTICS] = _find_missing_statistics(target)[target_rows] ^ _find_missing_statistics(golden)[golden_rows]
        if dump_dialects.differ(target, golden) or target.framework != golden.framework:
            known = factorize.of_each(golden.dtype, dump_dialects.has_all_statistics, bool)[golden_rows]
            one_sided[~known, _NOT_BY_ALL] = False
        bools = [factorize.of_each(side.dtype, is_bool, bool)[rows] for side, rows in ((target, target_rows), (golden, golden_rows))]
        one_sided[bools[0] != bools[1], _STATISTICS] = False  # two forms of a mask
    plain_target, plain_golden = (
        factorize.mask(target.values, len(target))[target_rows],
        factorize.mask(golden.values, len(golden))[golden_rows],
    )
    one_sided[plain_target | plain_golden] = False
    for position in np.flatnonzero(plain_target ^ plain_golden).tolist():
        side, row = (target, int(target_rows[position])) if plain_target[position] else (golden, int(golden_rows[position]))
        one_sided[position, _DTYPE] = side.values[row] is None and side.dtype[row] == _NO_TYPE
    if any(target.md5) and any(golden.md5):
        without = [np.fromiter((md5 is None for md5 in side.md5), bool, len(side)) for side in (target, golden)]
        one_sided[:, _CHECKSUM] = (without[0][target_rows] ^ without[1][golden_rows]) & ~plain_target & ~plain_golden
    one_sided[(_find_rows_without_values(target)[target_rows] | _find_rows_without_values(golden)[golden_rows]) | (elements == 0)] = False
    tensors = (
        ~plain_target
        & ~plain_golden
        & factorize.of_each(target.dtype, bool, bool)[target_rows]
        & factorize.of_each(golden.dtype, bool, bool)[golden_rows]
    )
    one_sided[:, SHAPE] = tensors & (_without(target.shape)[target_rows] ^ _without(golden.shape)[golden_rows])
    if target.mode == golden.mode == TENSOR:
        one_sided[:, _FILE] = tensors & (_without(target.data_name)[target_rows] ^ _without(golden.data_name)[golden_rows])
    if not dump_dialects.differ(target, golden):
        bools = factorize.of_each(target.dtype, is_bool, bool)[target_rows] & factorize.of_each(golden.dtype, is_bool, bool)[golden_rows]
        one_sided[:, _TRUES] = bools & (np.isnan(target.stats[target_rows, 3]) ^ np.isnan(golden.stats[golden_rows, 3]))
    one_sided[:, _VALUE] = (_empty(target)[target_rows] ^ _empty(golden)[golden_rows]) & ~one_sided[:, _DTYPE]
    return one_sided


def half_finite(
    target: DumpTable,
    golden: DumpTable,
    target_rows: factorize.Integers,
    golden_rows: factorize.Integers,
    target_stats: npt.NDArray[np.float64],
    golden_stats: npt.NDArray[np.float64],
) -> Bools:
    """Which pairs of rows have a mean or a norm that is NaN or Inf on one side and a finite number on the other. Two recorders or
    frameworks do not sum alike.

    Args:
        target_stats, golden_stats: float64 (n, 4), the statistics of the rows.
    """
    unlike = np.isfinite(target_stats[:, 2:]) != np.isfinite(golden_stats[:, 2:])
    if not unlike.any() or dump_dialects.differ(target, golden) or target.framework != golden.framework:
        return np.zeros(len(target_rows), bool)
    return np.asarray(
        (unlike & ~_find_missing_statistics(target)[target_rows, 2:] & ~_find_missing_statistics(golden)[golden_rows, 2:]).any(1)
    )


def alone(
    target: DumpTable, golden: DumpTable, pairs: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Rows of matched records that have no partner, of both sides, as `with_content` has them.

    Args:
        pairs: matched records.
        rows: rows that belong together.
    """
    alone_by_side = []
    for k, side in enumerate((target, golden)):
        first, ops = factorize.firsts(side), np.array([pair[k] for pair in pairs], np.int64)
        has_no_partner = factorize.mask(factorize.spread(first[ops], first[ops + 1] - first[ops]), len(side))
        has_no_partner[[row[k] for row in rows]] = False
        alone_by_side.append(np.flatnonzero(has_no_partner).tolist())
    return with_content(target, golden, alone_by_side[0], alone_by_side[1])


def with_content(
    target: DumpTable, golden: DumpTable, only_target: Iterable[int], only_golden: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Of rows without a partner those whose loss is one: nulls hold nothing, and two recorders or frameworks have rules of their own of
    what they write."""
    if dump_dialects.differ(target, golden) or target.framework != golden.framework:
        return [], []
    target_empty, golden_empty = _empty(target), _empty(golden)
    return [row for row in only_target if not target_empty[row]], [row for row in only_golden if not golden_empty[row]]


def expects_numbers(
    target: DumpTable, golden: DumpTable, target_rows: factorize.Integers, golden_rows: factorize.Integers, elements: factorize.Integers
) -> Bools:
    """Which pairs of rows are tensors with elements that somebody has written, in dumps that have numbers."""
    if STRUCTURE in (target.mode, golden.mode) or dump_dialects.differ(target, golden) or target.framework != golden.framework:
        return np.zeros(len(target_rows), bool)
    tensors = factorize.of_each(target.dtype, bool, bool)[target_rows] & factorize.of_each(golden.dtype, bool, bool)[golden_rows]
    return np.asarray(
        tensors & (elements > 0) & ~_find_rows_without_values(target)[target_rows] & ~_find_rows_without_values(golden)[golden_rows]
    )


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
    empty = np.fromiter((dtype is None for dtype in side.dtype), bool, len(side))
    empty[[row for row, value in side.values.items() if value is None]] = True
    return empty


def words(row: Bools) -> str:
    """Why one row of `on_one_side` was not compared whole."""
    if row[REDACTED]:
        return "values are redacted, and there are no digests of one key"
    if row[NOWHERE]:
        return "neither side has a number"
    return f"only one side has {' and '.join(name for name, missing in zip(WHAT, row.tolist()) if missing)}"


def sentences(
    target: DumpTable, golden: DumpTable, one_sided: Bools, only_target: Sequence[int] = (), only_golden: Sequence[int] = ()
) -> Iterator[Sentence]:
    """How many rows lack what, and what the dumps hold where that is not the same; nothing where all is on both sides.

    Args:
        one_sided: as `on_one_side` has it.
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
    hidden = int(one_sided[:, REDACTED].sum())
    if hidden:
        yield Sentence(
            "{0} against {1}: {2} rows hold redacted values without digests of one key on both sides; they cannot be compared",
            target.path,
            golden.path,
            f"{hidden:,}",
        )
    nowhere = int(one_sided[:, NOWHERE].sum())
    if nowhere == 1:
        yield Sentence("{0} against {1}: 1 row has no number on either side; it cannot be compared", target.path, golden.path)
    elif nowhere:
        many = "{0} against {1}: {2} rows have no number on either side; they cannot be compared"
        yield Sentence(many, target.path, golden.path, f"{nowhere:,}")
    for column, (name, count) in enumerate(zip(WHAT, one_sided.sum(0).tolist())):
        if column in (REDACTED, NOWHERE):
            continue
        if count == 1:
            yield Sentence(single, target.path, golden.path, name)
        elif count:
            yield Sentence(template, target.path, golden.path, f"{count:,}", name)


def _is_empty(shape: Any) -> bool:
    return isinstance(shape, list) and 0 in shape


def _find_missing_statistics(side: DumpTable) -> Bools:
    """bool (rows, 4): no number, not even NaN."""
    missing = np.zeros((len(side), 4), bool)
    for row, four in side.nonfloat_stats.items():
        missing[row] = [not is_number(value) for value in four]
    return missing


def _without(column: Sequence[Any]) -> Bools:
    return np.fromiter((not value and value != [] for value in column), bool, len(column))


def _find_rows_without_values(side: DumpTable) -> Bools:
    return factorize.mask([row for row, facts in side.extra.items() if not _NO_VALUES.isdisjoint(facts)], len(side))
