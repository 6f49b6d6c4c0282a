"""What two runs of different layouts are: their records side by side, and what is known of them before any row is put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import Matcher
from msprobe_engine.align.parallel import expected_differences, experts, merge_statistics, parameter_owner, pipeline_schedule, placements
from msprobe_engine.align.parallel.merge_statistics import AGREES, NEAR
from msprobe_engine.align.parallel.micro_batches import Piece, last_backward
from msprobe_engine.align.parallel.run_pieces import Run
from msprobe_engine.core.dtypes import is_bool, is_not_float
from msprobe_engine.formats.dump.dump_table import INPUT, PARAMETERS, DumpTable
from msprobe_engine.measure import distances, roundoff

_UNITS = 4
"""Of the dtype of the runs: as near as that numbers of the same whole are, whatever their own dtype is."""

_MANY = 0.1
"""Part of the tensors that a run has in a dtype that all its numbers are rounded to."""

OF_BUFFERS = frozenset(("copy_", "narrow", "view", "view_as", "cat", *(f"{way}flatten_dense_tensors" for way in ("", "un", "_", "_un"))))
"""Calls that put gradients into flat buffers and take them out."""


class LayoutPair:
    """The pieces of two runs.

    Args:
        target, golden: the pieces of both sides.

    Attributes:
        side, golden_side: the first piece of each; `i` is a row of the one, `j` of the other.
        agrees: closer than this a replica is taken for the right one when replicas disagree; `near`: the same, of single numbers.
        several: a side makes more than one micro batch.
        owned: record of the update -> the parameter that it updates.
        shared_out: the last record before the update where ranks share out the parameters; else the number of records.
    """

    def __init__(self, target: Sequence[Piece], golden: Sequence[Piece]) -> None:
        self.target, self.golden = Run(target), Run(golden)
        self.side, self.golden_side = self.target.first, self.golden.first
        trees = self.target.tree, self.golden.tree
        self.kinds = self.target.tree.kinds
        self.experts = experts.experts_of(self.side)
        self.around = set(experts.around(self.target.tree)) if self.experts else set()
        self.several = max(self.target.micro, self.golden.micro) > 1
        self.owned = parameter_owner.owners(self.target.tree)
        matched = parameter_owner.rematch_by_owner(Matcher(*trees).run(one_batch=False), *trees)
        self.structure = expected_differences.without_collectives(matched, *trees, self.owned)
        self.producers, self.golden_producers = Tree(self.side).producers, Tree(self.golden_side).producers
        self.golden_extra = set(self.structure.only_golden)
        self.records = dict(self.structure.pairs)
        self.rows, self.starts = distances.paired_rows(self.side, self.golden_side, self.structure.pairs)
        self.partners = dict(self.rows)
        shares = expected_differences.shares_out(self.target.tree) or expected_differences.shares_out(self.golden.tree)
        self.first_backward, self.last_backward = self.target.tree.first_backward, last_backward(self.target.tree)
        self.shared_out = self.last_backward if shares else len(self.side.ops)
        self.various = self.target.various | self.golden.various | expected_differences.unequally_owned(*trees)
        coarse = max(_coarsest(self.side), _coarsest(self.golden_side))
        self.agrees, self.near = max(AGREES, _UNITS * coarse), max(NEAR, coarse if coarse > AGREES / _UNITS else 0.0)
        self.target_placements, self.golden_placements = map(placements.Placements, trees)
        self.twins = placements.twins(self.target.tree)
        passes = pipeline_schedule.segments(self.target.tree, pipeline_schedule.whole) if self.target.tree.has_modules else None
        self._passes = passes if passes and pipeline_schedule.count(passes) > 1 else None

    def is_forward(self, op: int) -> bool:
        """A record of a forward pass, also of one that follows the backward pass of another micro batch."""
        if self._passes is None:
            return op < self.first_backward
        return self._passes[op] != pipeline_schedule.TAIL and self._passes[op][1] == pipeline_schedule.FORWARD

    def is_update(self, op: int) -> bool:
        """A call of the update of one parameter, where each rank has all of it."""
        return self.last_backward < op <= self.shared_out and op in self.owned

    def is_single(self, i: int, j: int) -> bool:
        """Both sides have one number here."""
        return distances.elements(self.side.shape[i]) == distances.elements(self.golden_side.shape[j]) == 1

    def kind(self, i: int) -> tuple[str, int]:
        """What a tensor keeps when it is written into."""
        return str(self.side.dtype[i]), distances.elements(self.side.shape[i])

    def is_mask(self, i: int) -> bool:
        """Statistics of a mask are the same on all ranks, whatever it masks: which one it is, is known by the call that made it."""
        return str(self.side.dtype[i]).endswith("bool")

    def is_made_by_both(self, i: int, j: int) -> bool:
        """What a row holds was given out by one record that both sides have."""
        target_source, golden_source = self.producers.get(i), self.golden_producers.get(j)
        return target_source is not None and golden_source is not None and self.records.get(target_source) == golden_source

    def is_made_by_others(self, i: int, j: int) -> bool:
        """What a row holds was given out by calls of two kinds: runs that clip gradients by other code pair numbers that are not of one
        meaning."""
        target_source, golden_source = self.producers.get(i), self.golden_producers.get(j)
        return (
            target_source is not None and golden_source is not None and self.kinds[target_source] != self.golden.tree.kinds[golden_source]
        )

    def has_cut_table(self, op: int, i: int) -> bool:
        """Something else that goes into a record is of another size on the other side."""
        taken = (row for row in self.side.rows(op) if row != i and self.side.role[row] in (INPUT, PARAMETERS))
        rows = (row for row in taken if isinstance(self.side.shape[row], list))
        return any(row in self.partners and self.side.shape[row] != self.golden_side.shape[self.partners[row]] for row in rows)

    @cached_property
    def cuts_batch(self) -> bool:
        """Each piece reads a part of the batch: a micro batch, or tokens of its own on each rank."""
        return self.several or self.reads_apart

    @cached_property
    def reads_apart(self) -> bool:
        """Pieces take in whole numbers (tokens) of other shapes than the other side's, of which these are made."""
        side, golden = self.side, self.golden_side
        return any(
            side.role[i] == INPUT
            and i not in self.producers
            and len(side.shape[i] or ()) > 1
            and side.shape[i] != golden.shape[j]
            and is_not_float(str(side.dtype[i]))
            and not is_bool(side.dtype[i])
            and merge_statistics.whole_shape(side.shape[i], golden.shape[j]) is not None
            for i, j in self.rows
        )

    @cached_property
    def holds_all(self) -> bool:
        """Every rank updates all of each parameter: what an update computes, to the last number, is the same in both layouts."""
        side, golden_side = self.side, self.golden_side
        behind = [(i, j) for i, j in self.rows if side.op[i] > self.last_backward and roundoff.eps(side.dtype[i])]
        tables = [(side.shape[i], golden_side.shape[j]) for i, j in behind if isinstance(side.shape[i], list) and len(side.shape[i]) > 1]
        return bool(tables) and self.shared_out == len(side.ops) and all(shape == golden_shape for shape, golden_shape in tables)

    @cached_property
    def buffers(self) -> set[int]:
        """Calls of no module that put gradients into flat buffers and take them out: what lies in a buffer, and after which micro batch,
        each layout decides by itself."""
        side, buffers = self.side, set[int]()
        for op, (direction, *_, api) in enumerate(self.kinds):
            if direction == "forward" and len(self.kinds[op]) == 3 and api in OF_BUFFERS:
                rows = (row for row in side.rows(op) if roundoff.eps(side.dtype[row]))
                if any(isinstance(side.shape[row], list) and len(side.shape[row] or ()) == 1 for row in rows):
                    buffers.add(op)
        return buffers

    def is_average(self, op: int) -> bool:
        """A call makes an average of what lies in such a buffer."""
        taken = (self.producers.get(row) for row in self.side.rows(op) if self.side.role[row] == INPUT)
        return self.kinds[op][-1] in ("div_", "mul_") and any(source in self.buffers for source in taken)

    @cached_property
    def parameters(self) -> dict[parameter_owner.Owner, Any]:
        """The shapes of parameters that modules show."""
        side = self.side
        rows = (row for row in range(len(side)) if side.role[row] == PARAMETERS)
        return {parameter_owner.owner_of(side, row, self.kinds[side.op[row]]): side.shape[row] for row in rows}


def _coarsest(side: DumpTable) -> float:
    """Distance of 1.0 to the next number in the coarsest dtype that many tensors have; 0 without any."""
    units = Counter(unit for dtype, shape in zip(side.dtype, side.shape) if isinstance(shape, list) and (unit := roundoff.eps(dtype)))
    return max((unit for unit, n in units.items() if n >= _MANY * units.total()), default=0.0)
