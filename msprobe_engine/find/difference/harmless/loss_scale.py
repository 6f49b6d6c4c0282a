"""Another loss scale is no difference: gradients in float16 are that many times the golden run's from the loss to where it is taken out.

A scale is a power of two, and scaling by it is exact. It is taken for one where a number that the loss is multiplied by has the ratio that
most gradients have, and a number behind the backward pass has it, too, or its inverse: what forgets to take it out stays a difference.
Where no functions were recorded, nobody can tell it from a loss of another size (`is_told`).
"""

from __future__ import annotations

import numpy as np

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.core.dtypes import plain_name
from msprobe_engine.core.operator_traits import SCALINGS
from msprobe_engine.find.difference.paired_rank import PairedRank
from msprobe_engine.formats.dump.dump_table import INPUT
from msprobe_engine.measure import distances, factorize
from msprobe_engine.measure.distances import Floats
from msprobe_engine.measure.factorize import Bools

_EXACT = 1e-6
"""Numbers in float32 that are exact multiples of each other."""

_NEAR = 0.02
"""Norms of gradients in float16."""


def scale_ratio(walker: PairedRank) -> float:
    """How many times the golden run's loss scale that of the target is; 1.0 where they are the same, or there is none."""
    if not all("float16" in {plain_name(str(dtype)) for dtype in set(side.dtype)} for side in (walker.side, walker.golden.side)):
        return 1.0
    ratio, backward = _ratios(walker), _of_gradients(walker)
    with np.errstate(all="ignore"):
        powers = np.round(np.log2(ratio[backward & np.isfinite(ratio) & (ratio > 0)]))
    if not len(powers):
        return 1.0
    values, counts = np.unique(powers, return_counts=True)
    scale = float(2.0 ** values[np.argmax(counts)])
    near = np.abs(ratio[backward] / scale - 1) < _NEAR
    return scale if 2 * near.sum() > backward.sum() and (not _has_functions(walker) or _is_scaled(walker, ratio, scale)) else 1.0


def is_told(walker: PairedRank) -> bool:
    """Functions were recorded, which show that the scale is put on and taken out; or there is no other scale."""
    return walker.scale == 1.0 or _has_functions(walker)


def without_scale(walker: PairedRank, scale: float) -> Tree:
    """The target with the numbers that it would have with the golden run's scale."""
    side, golden = walker.side.with_own_columns(), walker.golden.side
    target_rows, golden_rows = factorize.columns(walker.rows)
    ratio, backward = _ratios(walker), _of_gradients(walker)
    ops = [side.op[row] for row in target_rows.tolist()]
    behind = np.array(ops, np.int64) > walker.target.last_backward
    single = factorize.of_each(golden.shape, distances.elements)[golden_rows] <= 1
    numbers = side.stats.copy()
    for factor in (scale, 1 / scale):
        exact = np.abs(ratio / factor - 1) < _EXACT
        nearer = np.abs(ratio / factor - 1) < np.abs(ratio - 1)
        chosen = (nearer & (backward | behind)) if factor == scale else np.zeros(len(target_rows), bool)
        if factor == scale:  # the loss that is scaled may differ by round-off
            scaled = {walker.side.op[target_rows[pair]] for pair in np.flatnonzero(exact & single).tolist()}
            kinds = walker.target.kinds
            chosen |= nearer & single & np.fromiter((op in scaled and kinds[op][-1] in SCALINGS for op in ops), bool, len(target_rows))
        for pair in np.flatnonzero(chosen | (exact & single)).tolist():
            row, golden_row = int(target_rows[pair]), int(golden_rows[pair])
            if row in side.values and golden_row in golden.values:
                side.values[row], numbers[row] = golden.values[golden_row], golden.stats[golden_row]
            else:
                numbers[row] /= factor
    side.numbers[:] = type(side.numbers)("d", numbers.ravel().tolist())
    tree = Tree(side)
    tree.producers = walker.target.producers
    return tree


def _has_functions(walker: PairedRank) -> bool:
    return any(len(kind) == 3 for kind in walker.target.kinds)


def _ratios(walker: PairedRank) -> Floats:
    """float64 (pairs of rows,): norm, or number, of the target over the golden run's; 1.0 where there is none."""
    target_rows, golden_rows = factorize.columns(walker.rows)
    target_sizes, golden_sizes = np.abs(walker.side.stats[target_rows, 3]), np.abs(walker.golden.side.stats[golden_rows, 3])
    for pair, (row, golden_row) in enumerate(walker.rows):
        values = walker.side.values.get(row), walker.golden.side.values.get(golden_row)
        if isinstance(values[0], float) and isinstance(values[1], float):
            target_sizes[pair], golden_sizes[pair] = abs(values[0]), abs(values[1])
    with np.errstate(all="ignore"):
        ratios: Floats = np.where((target_sizes > 0) & (golden_sizes > 0), target_sizes / golden_sizes, 1.0)
    return ratios


def _of_gradients(walker: PairedRank) -> Bools:
    tree = walker.target
    ops = (walker.side.op[row] for row, _ in walker.rows)
    return np.fromiter((tree.kinds[op][0] == "backward" or tree.gradients[op] for op in ops), bool, len(walker.rows))


def _is_scaled(walker: PairedRank, ratio: Floats, scale: float) -> bool:
    """A number that something is multiplied by in front of the backward pass has the ratio, and one behind it has it or its inverse."""
    tree, side = walker.target, walker.side
    before = behind = False
    for pair in np.flatnonzero((np.abs(ratio / scale - 1) < _EXACT) | (np.abs(ratio * scale - 1) < _EXACT)).tolist():
        row = walker.rows[pair][0]
        op, shape = side.op[row], side.shape[row]
        if side.role[row] != INPUT or (isinstance(shape, list) and distances.elements(shape) > 1):
            continue
        direct = abs(ratio[pair] / scale - 1) < _EXACT
        before |= direct and op < tree.first_backward and tree.kinds[op][-1] in SCALINGS
        behind |= op > tree.last_backward
    return before and behind
