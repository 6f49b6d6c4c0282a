"""What of two rows that belong together only one side has: a statistic that is a number there and null, text or no key here, a dtype, a
checksum. The rest of such rows is compared, so they may differ where nobody could look; that is said and counted, never "the same".

What recorders leave out by design is no loss (`recorders.has_all_statistics`); memory that nobody has written (``uninitialised``) or that a
call does not read (``ignored``) has no numbers in dumps of this tool.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from msprobe_engine.compare import codes
from msprobe_engine.compare.record_rows import is_number
from msprobe_engine.compare.side import Side
from msprobe_engine.diagnose import recorders
from msprobe_engine.sentences import Sentence

Bools = npt.NDArray[np.bool_]

WHAT = ("Max", "Min", "Mean", "Norm", "dtype", "checksum", "redacted values")
"""Columns of what `on_one_side` returns. The last is `redacted`: values that were left out, and no digests of one key."""
REDACTED = 6
_STATISTICS, _DTYPE, _CHECKSUM = slice(0, 4), 4, 5
_NOT_BY_ALL = slice(2, 4)
_NO_VALUES = frozenset(("ignored", "uninitialised"))
_NO_TYPE = str(type(None))


def on_one_side(target: Side, golden: Side, left: codes.Integers, right: codes.Integers, elements: codes.Integers) -> Bools:
    """Which of `WHAT` only one side has.

    Args:
        left, right: int64 (n,), rows of both sides.
        elements: int64 (n,), of the tensors.

    Returns:
        bool (n, 7).
    """
    found = np.zeros((len(left), len(WHAT)), bool)
    if target.odd or golden.odd:
        found[:, _STATISTICS] = _missing(target)[left] ^ _missing(golden)[right]
        if recorders.differ(target, golden) or target.framework != golden.framework:
            known = codes.of_each(golden.dtype, recorders.has_all_statistics, bool)[right]
            found[~known, _NOT_BY_ALL] = False
    plain_a, plain_b = codes.mask(target.values, len(target))[left], codes.mask(golden.values, len(golden))[right]
    found[plain_a | plain_b] = False
    for at in np.flatnonzero(plain_a ^ plain_b).tolist():
        side, row = (target, int(left[at])) if plain_a[at] else (golden, int(right[at]))
        found[at, _DTYPE] = side.values[row] is None and side.dtype[row] == _NO_TYPE
    if any(target.md5) and any(golden.md5):
        without = [np.fromiter((md5 is None for md5 in side.md5), bool, len(side)) for side in (target, golden)]
        found[:, _CHECKSUM] = (without[0][left] ^ without[1][right]) & ~plain_a & ~plain_b
    found[(_unwritten(target)[left] | _unwritten(golden)[right]) | (elements == 0)] = False
    return found


def words(row: Bools) -> str:
    """Why one row of `on_one_side` was not compared whole."""
    if row[REDACTED]:
        return "values are redacted, and there are no digests of one key"
    return f"only one side has {' and '.join(what for what, missing in zip(WHAT, row.tolist()) if missing)}"


def sentences(target: Side, golden: Side, found: Bools) -> Iterator[Sentence]:
    """How many rows lack what; nothing where all is on both sides."""
    template = "{0} against {1}: {2} rows have {3} on one side only; of them only the rest was compared"
    hidden = int(found[:, REDACTED].sum())
    if hidden:
        yield Sentence(
            "{0} against {1}: {2} rows hold redacted values without digests of one key on both sides; they cannot be compared",
            target.path,
            golden.path,
            f"{hidden:,}",
        )
    for what, count in zip(WHAT[:REDACTED], found.sum(0).tolist()):
        if count:
            yield Sentence(template, target.path, golden.path, f"{count:,}", what)


def _missing(side: Side) -> Bools:
    """bool (rows, 4): no number, not even NaN."""
    found = np.zeros((len(side), 4), bool)
    for row, four in side.odd.items():
        found[row] = [not is_number(value) for value in four]
    return found


def _unwritten(side: Side) -> Bools:
    return codes.mask([row for row, facts in side.facts.items() if not _NO_VALUES.isdisjoint(facts)], len(side))
