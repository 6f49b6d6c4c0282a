"""The execution of a `MergePlan`: two sides of the same shapes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from msprobe_engine.align.calls.call_tree import Producers
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.align.parallel.merge_statistics import Floats
from msprobe_engine.align.parallel.run_pieces import Run
from msprobe_engine.align.parallel.unshard.plan import MergePlan
from msprobe_engine.formats.dump.dump_table import DumpTable


@dataclass
class GlobalTensors:
    """Attributes:
    target, golden: sides of the whole; records are those of the first piece of each.
    structure: which record belongs to which.
    producers: as `Tree.producers`, of the first piece of the target.
    plan: how the rows were put together.
    """

    target: DumpTable
    golden: DumpTable
    structure: Structure
    producers: Producers
    plan: MergePlan

    def swap_sides(self, producers: Producers) -> GlobalTensors:
        """The same with the sides changed over. `producers`: of the first piece of the golden side."""
        structure = Structure(
            sorted((golden_op, target_op) for target_op, golden_op in self.structure.pairs),
            self.structure.only_golden,
            self.structure.only_target,
            {golden_op: target_op for target_op, golden_op in self.structure.renamed.items()},
        )
        return GlobalTensors(self.golden, self.target, structure, producers, self.plan.swap_sides(dict(self.structure.pairs)))


def execute(plan: MergePlan, target: Run, golden: Run, structure: Structure, producers: Producers) -> GlobalTensors:
    """Write the rows of the whole into copies of the first piece of each side."""
    target_side, golden_side = target.first.with_own_columns(), golden.first.with_own_columns()
    for i in plan.arguments:
        _take_argument(target_side, i, golden_side, plan.partners[i])
    for i in (*plan.skipped, *plan.by_mean):
        _clear(target_side, i)
        _clear(golden_side, plan.partners[i])
    for i, row in plan.merged.items():
        if row.always or row.target_pieces > 1 or len(target.pieces) > 1:
            _write(target_side, i, row.target, row.shape, row.target_pieces, target)
        if row.always or row.golden_pieces > 1 or len(golden.pieces) > 1:
            _write(golden_side, plan.partners[i], row.golden, row.shape, row.golden_pieces, golden)
    return GlobalTensors(target_side, golden_side, structure, producers, plan)


def _take_argument(target: DumpTable, i: int, golden: DumpTable, j: int) -> None:
    target.values[i], target.shape[i], target.md5[i] = golden.values[j], golden.shape[j], golden.md5[j]
    target.numbers[4 * i : 4 * i + 4] = golden.numbers[4 * j : 4 * j + 4]
    target.nonfloat_stats.pop(i, None)
    if j in golden.nonfloat_stats:
        target.nonfloat_stats[i] = golden.nonfloat_stats[j]


def _clear(side: DumpTable, row: int) -> None:
    side.numbers[4 * row : 4 * row + 4] = array("d", (float("nan"),) * 4)
    side.nonfloat_stats[row] = (None, None, None, None)
    side.md5[row] = None
    side.shape[row] = None
    for known in (side.values, side.nans, side.infs, side.extra):
        known.pop(row, None)


def _write(side: DumpTable, row: int, statistics: Floats, shape: Sequence[int], pieces: int, run: Run) -> None:
    span = slice(4 * row, 4 * row + 4)
    if side.shape[row] != shape or not np.array_equal(side.numbers[span], statistics, equal_nan=True):
        side.md5[row], side.data_name[row] = None, ""  # checksums and saved tensors are of what one rank holds
        side.extra[row] = {key: fact for key, fact in side.extra.get(row, {}).items() if key != "digest"}
    side.numbers[span] = array("d", statistics.tolist())
    if side.shape[row] != shape:
        side.shape[row] = list(shape)
        side.nonfloat_stats.pop(row, None)
    for known, which in ((side.nans, attrgetter("nans")), (side.infs, attrgetter("infs"))):
        count = run.count(row, which) * pieces // len(run.pieces)  # replicas hold the same ones
        if count:
            known[row] = count
