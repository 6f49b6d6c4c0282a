"""What can be compared of two rows that both hold NaN or Inf: the -inf of a mask leaves the maximum, and counts.

A number that is infinite or NaN on both sides says nothing. Of a tensor with -inf its Max is left, measured against the largest number of
its record: the elements below the maximum, which its round-off comes from, may be larger than it. Counts of NaN and Inf are compared where
both dumps have them. Where nothing is left, the rows cannot be compared, which is not to say that they are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure.factorize import Bools, Integers

Floats = npt.NDArray[np.float64]


def compare_rows(
    target: DumpTable, golden: DumpTable, left: Integers, right: Integers, a: Floats, b: Floats, floating: Bools
) -> tuple[Floats, Bools, Bools]:
    """Compare rows that hold NaN or Inf on both sides.

    Args:
        left, right: int64 (n,), rows of both sides.
        a, b: float64 (n, 4), their Max, Min, Mean and Norm.
        floating: bool (rows of the golden side,), tensors of floating point.

    Returns:
        float64 (n,), the distance: that of the finite extremes, or the share of the infinities (NaN) that only one side has; inf where an
        extreme is infinite on one side only, or of another sign; 0 where nothing can be compared.
        bool (n,), where something could be compared.
        bool (n,), where the target has an infinity in place of a number.
    """
    x, y = a[:, :2], b[:, :2]
    with np.errstate(all="ignore"):
        finite = np.isfinite(x) & np.isfinite(y)
        top = np.maximum(np.where(finite, np.maximum(np.abs(x), np.abs(y)), 0.0).max(1), _largest(golden, floating)[right])
        apart = np.where(finite, np.abs(x - y), 0.0).max(1)
        distance = np.where(apart == 0, 0.0, apart / top)
        unlike = (np.isinf(x) | np.isinf(y)) & (x != y) & ~np.isnan(x) & ~np.isnan(y)
        whole = (x == y).all(1) & (x[:, 0] == x[:, 1])  # all elements are one infinity
    known = finite.any(1) | unlike.any(1) | whole
    distance[unlike.any(1)] = np.inf
    for mine, theirs in ((target.nans, golden.nans), (target.infs, golden.infs)):
        shares = _shares(mine, theirs, left, right)
        distance = np.maximum(distance, shares)
        known |= shares > 0
    return distance, known, np.asarray((unlike & np.isinf(x) & np.isfinite(y)).any(1))


def _largest(side: DumpTable, floating: Bools) -> Floats:
    """float64 (rows,): the largest finite extreme of a tensor of floating point in the record of each row."""
    with np.errstate(all="ignore"):
        extremes = np.abs(side.stats[:, :2])
    sizes = np.where(floating[:, None] & np.isfinite(extremes), extremes, 0.0).max(1)
    record = np.asarray(side.op, np.int64)
    found = np.zeros(len(side.ops))
    np.maximum.at(found, record, sizes)
    return np.asarray(found[record])


def _shares(mine: Mapping[int, int], theirs: Mapping[int, int], left: Integers, right: Integers) -> Floats:
    """float64 (n,): by how much two counts differ, relative to the larger one; 0 where only one side has a count."""
    found = np.zeros(len(left))
    for at, (i, j) in enumerate(zip(left.tolist(), right.tolist()) if mine and theirs else ()):
        one, two = mine.get(i, 0), theirs.get(j, 0)
        if one and two:
            found[at] = abs(one - two) / max(one, two)
    return found
