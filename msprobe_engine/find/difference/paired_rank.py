"""One rank of one step of both runs: which records and rows belong together, and how far they are apart."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from msprobe_engine.align.calls.alignment import are_of_different_frameworks
from msprobe_engine.align.calls.call_tree import Tree, calls_function
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.align.parallel.parameter_owner import Mark, Owner, owners_and_tensors
from msprobe_engine.find.coverage import other_ways
from msprobe_engine.find.difference import lone_arguments
from msprobe_engine.find.difference.harmless import flat_buffers
from msprobe_engine.find.difference.lone_arguments import LoneArgument
from msprobe_engine.find.difference.noise import kept_tensors
from msprobe_engine.find.origin import GRADIENT, RESULT, TAKEN, DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import distances, factorize
from msprobe_engine.measure.distances import Floats
from msprobe_engine.measure.factorize import Integers
from msprobe_engine.measure.propagation import Noise

Parameter = tuple[str, str]
"""Path of a module and name of its parameter."""


@dataclass
class Cancelled:
    """Gradients of one rank of one step that come to nothing (`optimizer.cancelling_gradients`).

    Attributes:
        excused: float64 per pair of rows: its difference comes from a gradient that cancelled; 0: it does not.
        parameters: those whose gradient did.
        vectors: rows of the golden side that functions take in whose gradient did, by their names.
    """

    excused: Floats
    parameters: set[Parameter] = field(default_factory=set)
    vectors: set[str] = field(default_factory=set)


class Ratios:
    """One per pair of rows, see `noise.carried`: differences as many times what is explained."""

    ratio: list[float]
    alone: list[float]


class PairedRank:
    """See the module.

    Args:
        target, golden: trees of both sides.
        structure: which record belongs to which.

    Attributes:
        one_layout: both sides are cut alike.
        other_update: the parameters were moved by other calls in the step before.
        lone_updates: pairs of rows of parameters that alone were moved otherwise in the step before (`optimizer.lone_updates`).
        updated: numbers of what the update of the step before gave out -> its noise.
        one_program: both sides are of one framework and of one layout, so that the same bits make the same bits.
        so_far: pairs of rows that are parts of a sum, which the sides add up in different orders.
        repeating: records of the target that repeat by themselves what another call repeats on the other side, or the other way round.
        finished: records of the target that make of a result what a single call of the golden side gives.
        scale: of the loss, as many times the golden run's; it is taken out.
        hidden_by: a row that says by which number the target hides scores, and the number on either side, where it is another one.
        by_mean: rows of the target of which the mean alone was compared.
        foreign: record of the target -> largest distance of what other ranks put into the same collective.
        cancelled: gradients that come to nothing.
    """

    one_layout = True
    hidden_by: tuple[str, float, float] | None = None
    by_mean: Set[int] = frozenset()
    other_update = False
    lone_updates: Set[int] = frozenset()
    scale: float
    measured: distances.Distances
    so_far: list[int]
    cancelled: Cancelled

    def __init__(self, target: Tree, golden: Tree, structure: Structure) -> None:
        for without in (
            other_ways.without_updates,
            other_ways.without_other_code,
            other_ways.without_other_exchange,
            flat_buffers.without_pieces,
        ):
            structure = without(structure, target, golden)
        self.target, self.golden, self.structure = target, golden, structure
        self.foreign: dict[int, float] = {}
        self.finished: set[int] = set()
        self.repeating: set[int] = set()
        self.updated: dict[bytes, Noise] = {}
        self.one_program = not are_of_different_frameworks(target.side, golden.side)
        self.side: DumpTable = target.side
        self.rows, self.starts = distances.paired_rows(self.side, golden.side, structure.pairs)
        self.extra = set(structure.only_target)
        self.missing = set(structure.only_golden)
        self._position = {op: position for position, (op, _) in enumerate(structure.pairs)}
        self.back = {golden_op: target_op for target_op, golden_op in structure.pairs}
        self.moved = np.zeros(0)  # by which round-off was measured to move the rows of the golden side; it is accepted, too

    @property
    def carried(self) -> Ratios:
        """What round-off explains."""
        raise NotImplementedError

    @cached_property
    def updates_otherwise(self) -> bool:
        """The optimizers of the two sides make other calls (``foreach``, ``fused``), which round otherwise."""
        if not any(len(kind) == 3 for tree in (self.target, self.golden) for kind in tree.kinds):
            return True  # calls of functions were not recorded
        behind = self.target.last_backward, self.golden.last_backward
        return any(op > behind[0] for op in self.extra) and any(op > behind[1] for op in self.missing)

    @cached_property
    def owners(self) -> tuple[dict[int, Owner], dict[Mark, Owner | None]]:
        """Whose calls of the update, and whose tensors, those of the target are."""
        return owners_and_tensors(self.target)

    @cached_property
    def outputs_by_numbers(self) -> dict[bytes, list[int]]:
        """Numbers of a tensor -> rows of it that functions of the target only gave out, in order."""
        rows_by_numbers: dict[bytes, list[int]] = {}
        for op in sorted(self.extra):
            if calls_function(self.target.kinds[op]):
                for row in self.side.rows(op):
                    if self.side.role[row] == OUTPUT:
                        rows_by_numbers.setdefault(self.side.stats[row].tobytes(), []).append(row)
        return rows_by_numbers

    @cached_property
    def gradients(self) -> dict[str, list[int]]:
        """Path of a module -> records of the gradients of its parameters, one of each micro batch."""
        records: dict[str, list[int]] = {}
        for op, gradients in enumerate(self.target.gradients):
            if gradients:
                records.setdefault(self.target.kinds[op][2], []).append(op)
        return records

    @cached_property
    def backward_calls(self) -> dict[str, list[int]]:
        """Path of a module -> records of the backward passes through it."""
        records: dict[str, list[int]] = {}
        for op, kind in enumerate(self.target.kinds):
            if len(kind) == 4 and kind[0] == "backward":
                records.setdefault(kind[2], []).append(op)
        return records

    @cached_property
    def lone_arguments(self) -> dict[int, LoneArgument]:
        """Record of the target -> an argument of its call that one side alone gives."""
        return lone_arguments.lone_arguments(self.target, self.golden, self.structure.pairs, self.rows) if self.one_layout else {}

    @property
    def users(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """`Tree.users` of the target and of the golden side."""
        return self.target.users, self.golden.users

    def __getstate__(self) -> dict[str, Any]:
        """Pairs of rows go from one process to the other as an array: a tuple each would take many times as long."""
        return self.__dict__ | {"rows": np.stack(factorize.columns(self.rows))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.rows = list(zip(*state["rows"].tolist()))

    def span_of(self, op: int) -> range:
        """Positions of a record's pairs of rows; empty when nothing matches it."""
        position = self._position.get(op)
        return range(0) if position is None else range(self.starts[position], self.starts[position + 1])

    def result_pairs(self, op: int) -> list[int]:
        """Pairs of rows of what a record gives out."""
        return [pair for pair in self.span_of(op) if self.side.role[self.rows[pair][0]] == OUTPUT]

    def span_of_twin(self, op: int) -> range:
        """`span_of` of the backward call of a forward call."""
        twin = self.target.twin(op)
        return range(0) if twin is None else self.span_of(twin)

    def position(self, op: int) -> int:
        """Position of a record among the pairs of records; -1 when nothing matches it."""
        return self._position.get(op, -1)

    def pair_of(self, row: int) -> int:
        """Position of the pair that a row of the target is in; -1 when it is in none."""
        return next((pair for pair in self.span_of(self.side.op[row]) if self.rows[pair][0] == row), -1)

    def other_arguments(self) -> list[int]:
        """Rows that are arguments of another value than on the golden side."""
        return [self.rows[pair][0] for pair in np.flatnonzero(self.measured.argument).tolist()]

    @cached_property
    def order(self) -> Integers:
        """Positions of pairs in the order of execution: parameter gradients stand where their module's backward pass ends."""
        tree = self.target
        place = np.fromiter((op for op, _ in self.structure.pairs), np.int64, len(self.structure.pairs))
        gradients = np.array(tree.gradients, bool)[place] if len(place) else np.zeros(0, bool)
        ops = place.copy()
        if gradients.any():
            ends = {kind[2]: i for i, kind in enumerate(tree.kinds) if len(kind) == 4 and kind[0] == "backward"}
            for position in np.flatnonzero(gradients).tolist():
                op = int(ops[position])
                place[position] = max(ends.get(tree.kinds[op][2], op), op)
        return np.lexsort((np.arange(len(ops)), ops, gradients, place))

    @property
    def calibrated(self) -> bool:
        """What round-off moves each row by was measured."""
        return len(self.moved) > 0

    @cached_property
    def _parameters(self) -> tuple[set[bytes], set[bytes]]:
        """Numbers of the parameters that modules show, of the target and of the golden side."""
        target, golden = (
            {side.stats[row].tobytes() for row in np.flatnonzero(np.frombuffer(bytes(side.role), np.uint8) == PARAMETERS).tolist()}
            for side in (self.side, self.golden.side)
        )
        return target, golden

    def is_parameter(self, row: int) -> bool:
        """A row of the target is a parameter that a function takes in: one that requires a gradient and no record has made, on one side at
        least (the other one may have changed it before)."""
        if not self.side.requires_grad[row] or not isinstance(self.side.shape[row], list):
            return False
        if not self._parameters[1]:  # no calls of modules, which would say so
            return self.target.takes_parameter(row)
        pair = self.pair_of(row)
        rows = (self.side, row), (self.golden.side, self.rows[pair][1])
        return pair >= 0 and any(side.stats[row_of_side].tobytes() in known for (side, row_of_side), known in zip(rows, self._parameters))

    def has_numbers_of_parameter(self, row: int) -> bool:
        """A row of the target has the numbers of a parameter that a module shows."""
        return bool(self.side.requires_grad[row]) and self.side.stats[row].tobytes() in self._parameters[0]

    @cached_property
    def kept(self) -> tuple[Integers, Integers, Integers, Integers]:
        """`kept_tensors.of_pairs`."""
        return kept_tensors.of_pairs(self.target, self.structure.pairs, self._position)

    def _origin(self, op: int, golden_op: int, kind: str, pair: int, inside: float, shown: int = -1) -> DifferenceOrigin:
        """`pair`: the pair of rows to name; `shown`: that of the distance, when it is another one."""
        row, golden_row = self.rows[pair]
        m, number = self.measured, pair if shown < 0 else shown
        distance = float(m.distance[number])
        times = self.carried.ratio[number]
        count = distances.elements(self.side.shape[row])
        noise = count >= 64 and m.norm[pair] * np.sqrt(count) <= 8 * m.extremes[pair] and kind in (RESULT, GRADIENT)
        limit = distance / times if 0 < times < np.inf and distance < np.inf else 0.0
        return DifferenceOrigin(op, golden_op, kind, row, golden_row, distance, inside, limit, times, bool(noise))

    def move(self, origin: DifferenceOrigin, position: int, given: int) -> None:
        """The difference begins in what another pair of records takes in; `given`: the pair of rows."""
        vars(origin).update(vars(self._origin(*self.structure.pairs[position], TAKEN, given, 0.0)))

    def not_compared(self, op: int, given: bool = False) -> list[int]:
        """Rows of tensors that a record takes in (`given`: gives out) and that could not be compared."""
        side = self.side
        rows = (self.rows[pair][0] for pair in self.span_of(op) if not self.measured.compared[pair])
        tensors = (row for row in rows if side.dtype[row] and distances.elements(side.shape[row]))
        return [row for row in tensors if (side.role[row] in (OUTPUT, PARAMETERS_GRAD)) is given]

    def is_without_graph(self, op: int, golden_op: int) -> bool:
        """Autograd records nothing of a forward call in the backward pass (its flag is that of a view, or not, of what was kept), nor in a
        function with a backward pass of its own (a kernel), whose gradients are compared."""
        for tree, record in ((self.target, op), (self.golden, golden_op)):
            above = [tree.kinds[outer] for outer in tree.above(record)] if tree.kinds[record][0] == "forward" else []
            if any(kind[0] == "backward" or kind[:2] == ("forward", "Autograd") for kind in above):
                return True
        return False

    def is_off(self, op: int) -> bool:
        """Do outputs of a record differ by more than round-off?"""
        return any(
            self.side.role[self.rows[pair][0]] in (OUTPUT, PARAMETERS_GRAD) and self.carried.alone[pair] > 1 for pair in self.span_of(op)
        )
