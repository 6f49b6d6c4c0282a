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
    target: DumpTable,
    golden: DumpTable,
    target_rows: Integers,
    golden_rows: Integers,
    target_stats: Floats,
    golden_stats: Floats,
    floating: Bools,
) -> tuple[Floats, Bools, Bools]:
    """Compare rows that hold NaN or Inf on both sides.

    Args:
        target_rows, golden_rows: int64 (n,), rows of both sides.
        target_stats, golden_stats: float64 (n, 4), their Max, Min, Mean and Norm.
        floating: bool (rows of the golden side,), tensors of floating point.

    Returns:
        float64 (n,), the distance: that of the finite extremes, or the share of the infinities (NaN) that only one side has; inf where an
        extreme is infinite on one side only, or of another sign; 0 where nothing can be compared.
        bool (n,), where something could be compared.
        bool (n,), where the target has an infinity in place of a number.
    """
    target_extremes, golden_extremes = target_stats[:, :2], golden_stats[:, :2]
    with np.errstate(all="ignore"):
        finite = np.isfinite(target_extremes) & np.isfinite(golden_extremes)
        top = np.maximum(
            np.where(finite, np.maximum(np.abs(target_extremes), np.abs(golden_extremes)), 0.0).max(1),
            _largest(golden, floating)[golden_rows],
        )
        apart = np.where(finite, np.abs(target_extremes - golden_extremes), 0.0).max(1)
        distance = np.where(apart == 0, 0.0, apart / top)
        unlike = (
            (np.isinf(target_extremes) | np.isinf(golden_extremes))
            & (target_extremes != golden_extremes)
            & ~np.isnan(target_extremes)
            & ~np.isnan(golden_extremes)
        )
        whole = (target_extremes == golden_extremes).all(1) & (
            target_extremes[:, 0] == target_extremes[:, 1]
        )  # all elements are one infinity
    known = finite.any(1) | unlike.any(1) | whole
    distance[unlike.any(1)] = np.inf
    for target_counts, golden_counts in ((target.nans, golden.nans), (target.infs, golden.infs)):
        shares = _shares(target_counts, golden_counts, target_rows, golden_rows)
        distance = np.maximum(distance, shares)
        known |= shares > 0
    return distance, known, np.asarray((unlike & np.isinf(target_extremes) & np.isfinite(golden_extremes)).any(1))


def _largest(side: DumpTable, floating: Bools) -> Floats:
    """float64 (rows,): the largest finite extreme of a tensor of floating point in the record of each row."""
    with np.errstate(all="ignore"):
        extremes = np.abs(side.stats[:, :2])
    sizes = np.where(floating[:, None] & np.isfinite(extremes), extremes, 0.0).max(1)
    record = np.asarray(side.op, np.int64)
    largest = np.zeros(len(side.ops))
    np.maximum.at(largest, record, sizes)
    return np.asarray(largest[record])


def _shares(target_counts: Mapping[int, int], golden_counts: Mapping[int, int], target_rows: Integers, golden_rows: Integers) -> Floats:
    """float64 (n,): by how much two counts differ, relative to the larger one; 0 where only one side has a count."""
    shares = np.zeros(len(target_rows))
    for position, (i, j) in enumerate(zip(target_rows.tolist(), golden_rows.tolist()) if target_counts and golden_counts else ()):
        target_count, golden_count = target_counts.get(i, 0), golden_counts.get(j, 0)
        if target_count and golden_count:
            shares[position] = abs(target_count - golden_count) / max(target_count, golden_count)
    return shares
