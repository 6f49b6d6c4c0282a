"""The ranks that hold pieces of the same tensors as one rank that holds the whole.

A tensor is a replica (all ranks say the same), one of several pieces of a whole, or a term of a sum (`terms`). The statistics of the whole
follow exactly in all three cases. Ranks whose replicas should agree, and do not, are said: a call without anything cut that took in the
same on all ranks and gave out something else, and a parameter that the dump says is not cut.

Tensors that are one rank's term of something the ranks then reduce: a sum, mostly.

The product in a row-parallel layer, the gradient of the input of a column-parallel layer, the largest logit of a part of the vocabulary:
what one rank has of them says nothing about the whole, and no rule makes the whole's statistics of those of the terms. But the dump has
the whole: it is what the collective gave out. Which tensors are such terms follows from the numbers, as the same tensor goes from call
to call until the collective takes it in.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from msprobe_engine.align.parallel import merge_statistics
from msprobe_engine.align.parallel.experts import merge_weighted
from msprobe_engine.align.parallel.merge_statistics import Floats
from msprobe_engine.align.parallel.placements import twins
from msprobe_engine.align.parallel.unshard.partial_sums import PASSING
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.dump_table import INPUT, MD5, OUTPUT, PARAMETERS, STATISTICS, STRUCTURE, TENSOR, DumpTable, Value
from msprobe_engine.measure import distances
from msprobe_engine.report.graph.merge.dims import Cut, Told, cuts
from msprobe_engine.report.graph.merge.rank_stack import RankStack

_RANDOM = ("dropout", "rand", "bernoulli", "normal", "uniform", "multinomial", "exponential", "empty")
"""Parts of the names of calls that give out something else each time."""

_NAMES = ("Max", "Min", "Mean", "Norm")


@dataclass
class Merged:
    """Attributes:
    side: of the first rank, its rows replaced by those of the whole.
    notes: record -> sentences on how its rows were made, one per row that is none of the first rank's own.
    unlike: sentences about replicas that do not agree.
    lost: per rank but the first, names of records that are on that rank alone.
    """

    side: DumpTable
    notes: dict[int, list[str]] = field(default_factory=dict)
    unlike: list[str] = field(default_factory=list)
    lost: dict[int, list[str]] = field(default_factory=dict)


def merge_sides(sides: Mapping[int, DumpTable]) -> Merged:
    """Make one side of several.

    Args:
        sides: by rank; ranks that ran the same part of the model on the same data.

    Raises:
        UsageError: the dumps have no statistics.
    """
    for rank, side in sides.items():
        if side.mode not in (STATISTICS, TENSOR, MD5, STRUCTURE) or (side.mode == MD5 and not np.isfinite(side.stats).any()):
            raise UsageError(f"{side.path}: has checksums, no statistics; rank {rank} cannot be merged. Dump task statistics")
    if len(sides) == 1:
        return Merged(next(iter(sides.values())))
    return _Merger(RankStack(sides)).run()


class _Merger:
    def __init__(self, beside: RankStack) -> None:
        self.beside, self.first = beside, beside.first
        self.told = Told(beside)
        self.twins = twins(beside.tree)
        self.made = Merged(beside.first.with_own_columns())
        if beside.first.task != "structure":
            self.made.side.header = {**beside.first.header, "task": "statistics"}
        self.ranks = ", ".join(map(str, beside.ranks))

    def run(self) -> Merged:
        beside, side = self.beside, self.made.side
        sums = terms(beside)
        differs = [row for row in np.flatnonzero(beside.tensor & ~beside.alike & (beside.at >= 0).any(0)).tolist() if row not in sums]
        same = set(self.unlike(differs))
        pieces = [row for row in differs if row not in same and len(beside.members(row)) > 1]
        also = self.cut_alike()
        where = cuts(beside, self.told, sorted((*pieces, *also)))
        for row, term in sums.items():
            self.put_sum(row, term)
        for row in sorted({*pieces, *where}):
            self.put_pieces(row, where.get(row))
        for row in differs:
            if row not in same and len(beside.members(row)) == 1:
                self.add_note(row, Sentence("is on rank {0} alone", beside.ranks[beside.members(row)[0][0]]))
        self.say_arguments()
        for rank, there, records in zip(beside.ranks, beside.sides, beside.lost_records()):
            if records:
                self.made.lost[rank] = [there.ops[op] for op in records]
        side.md5 = [None if row not in side.values else md5 for row, md5 in enumerate(side.md5)]
        side.data_name = [""] * len(side)
        return self.made

    def cut_alike(self) -> list[int]:
        """Rows that say the same on all ranks and are pieces all the same, as the dump says: zeros, mostly."""
        same = np.flatnonzero(self.beside.tensor & self.beside.alike & self.beside.everywhere)
        return [row for row in same.tolist() if self.told.is_cut(row)]

    def unlike(self, differs: list[int]) -> list[int]:
        """Say replicas that do not agree, and return their rows, which stay those of the first rank."""
        beside, first = self.beside, self.first
        differing = []
        for row in differs:
            op = first.op[row]
            if self.told.is_whole(row):
                reason = Sentence("the dump says that all ranks hold the whole of it")
            elif first.role[row] == OUTPUT and self.should_agree(op):
                reason = Sentence("all ranks took in the same")
            else:
                continue
            values = self.values(row)
            self.add_note(
                row, Sentence("differs between ranks {0}, and {1}: {2}. Shown as on rank {3}", self.ranks, reason, values, beside.ranks[0])
            )
            self.made.unlike.append(f"{first.name[row]}: differs between ranks {self.ranks}, and {reason} ({values})")
            differing.append(row)
        return differing

    def should_agree(self, op: int) -> bool:
        """A forward call, with nothing inside it, that took in the same tensors and arguments on all ranks, and has no reason to give out
        other things."""
        beside, first = self.beside, self.first
        name = first.ops[op]
        kind = beside.tree.kinds[op]
        if kind[0] != "forward" or len(kind) == 4 or beside.tree.children.get(op) or op in first.collectives:
            return False
        if name.startswith(("Autograd.", "Distributed.")) or any(word in kind[-1].lower() for word in _RANDOM) or kind[-1].endswith("_"):
            return False
        taken = [row for row in first.rows(op) if first.role[row] in (INPUT, PARAMETERS)]
        tensors = [row for row in taken if beside.tensor[row]]
        if not tensors or not all(beside.equal[row] and beside.stats[0, row, 3] > 0 for row in tensors):
            return False
        return all(self.argument_agrees(row) for row in taken if not beside.tensor[row])

    def argument_agrees(self, row: int) -> bool:
        values = [self.beside.sides[place].values.get(rank_row) for place, rank_row in self.beside.members(row)]
        return len(values) == len(self.beside.ranks) and all(repr(value) == repr(values[0]) for value in values)

    def say_arguments(self) -> None:
        """Arguments that are other ones on each rank: sizes, places."""
        for row in self.first.values:
            if not self.argument_agrees(row):
                values = (
                    Sentence("{0} on {1}", self.beside.sides[place].values.get(at), self.beside.ranks[place])
                    for place, at in self.beside.members(row)
                )
                self.add_note(row, Sentence("differs between ranks: {0}", ", ".join(values)))

    def values(self, row: int) -> str:
        """Statistics of all ranks, of those that differ."""
        said = []
        fours = [self.beside.sides[place].stats_of(at) for place, at in self.beside.members(row)]
        for name, values in zip(_NAMES, zip(*fours)):
            if any(value != values[0] for value in values):
                said.append(f"{name} {', '.join(map(_short, values))}")
        return "; ".join(said)

    def add_note(self, row: int, text: str) -> None:
        start = len(self.first.ops[self.first.op[row]]) + 1
        self.made.notes.setdefault(self.first.op[row], []).append(Sentence("{0}: {1}", self.first.name[row][start:], text))

    def put_sum(self, row: int, one: Sum) -> None:
        """A term becomes the sum."""
        where = Sentence("the numbers are those of all, as {0} gives them out", self.first.ops[one.record])
        self.add_note(row, Sentence("one term on each of ranks {0}; {1} ({2})", self.ranks, where, self.values(row)))
        self.store_row(row, one.value, list(self.first.shape[row]))

    def put_pieces(self, row: int, cut: Cut | None) -> None:
        """Pieces become the whole. Single numbers, which are none, become all of them."""
        beside = self.beside
        members = [
            (place, rank_row, shape)
            for place, rank_row in beside.members(row)
            if isinstance(shape := beside.sides[place].shape[rank_row], list)
        ]
        whole = list(self.first.shape[row])
        if cut is not None:
            whole[cut.dimension] = sum(shape[cut.dimension] for _, _, shape in members)
        where = "" if cut is None else Sentence(" along dimension {0}", cut.dimension)
        held = ", ".join(str(beside.ranks[place]) for place, _, _ in members)
        values = self.values(row)
        how = Sentence("put together{0} from", where)
        if cut is None and self.is_open_term(row):
            how = Sentence("one term of a sum that the dump does not have here; the statistics are those of all terms, on")
        elif cut is None and distances.elements(whole) == 1:
            how = Sentence("one number on each rank; the statistics are those of all numbers, on")
        self.add_note(row, Sentence("{0} ranks {1}{2}", how, held, f" ({values})" if values else ""))
        value = merge_weighted([(shape, beside.stats[place, row]) for place, _, shape in members])
        self.store_row(row, value, whole)
        side = self.made.side
        for known in ("nans", "infs"):
            count = sum(getattr(beside.sides[place], known).get(rank_row, 0) for place, rank_row, _ in members)
            if count:
                getattr(side, known)[row] = count

    def is_open_term(self, row: int) -> bool:
        """The gradient of something that all ranks hold alike, and that is not the same on all of them."""
        twin = self.twins.get(row)
        return twin is not None and bool(self.beside.alike[twin]) and not self.told.is_cut(twin)

    def store_row(self, row: int, value: Floats, shape: list[int]) -> None:
        side = self.made.side
        side.numbers[4 * row : 4 * row + 4] = array("d", value.tolist())
        side.shape[row] = shape
        side.extra[row] = {key: fact for key, fact in side.extra.get(row, {}).items() if key != "digest"}
        if row in side.nonfloat_stats:
            side.nonfloat_stats[row] = self.odd(row)

    def odd(self, row: int) -> tuple[Value, Value, Value, Value]:
        """Statistics that are no floats (those of whole numbers, of masks), each put together for itself."""
        fours = [self.beside.sides[place].stats_of(rank_row) for place, rank_row in self.beside.members(row)]
        made: list[Value] = []
        for name, values in zip(_NAMES, zip(*fours)):
            numbers = [value for value in values if isinstance(value, (int, float)) and not (type(value) is float and math.isnan(value))]
            if len(numbers) < len(values):
                made.append(values[0])
            elif name in ("Max", "Min"):
                made.append(max(numbers) if name == "Max" else min(numbers))
            else:
                made.append(sum(numbers) / len(numbers) if name == "Mean" else math.sqrt(sum(number * number for number in numbers)))
        return made[0], made[1], made[2], made[3]


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Sum(NamedTuple):
    """Attributes:
    record: the call that reduces.
    value: float64 (4,) of Max, Min, Mean, Norm of what comes out, on all ranks together.
    """

    record: int
    value: Floats


def terms(beside: RankStack) -> dict[int, Sum]:
    """Row -> what it is a term of."""
    first = beside.first
    by_key: dict[bytes, Sum] = {}
    for op in first.collectives:
        if "reduce" in first.ops[op]:
            for taken, given in _pairs(beside, op):
                value = _whole(beside, taken, given)
                if value is not None:
                    by_key.setdefault(beside.key(taken), Sum(op, value))
    found: dict[int, Sum] = {}
    differs = beside.tensor & ~beside.alike
    for op in reversed(range(len(first.ops)) if by_key else ()):
        rows = [row for row in first.rows(op) if differs[row]]
        sums = {row: by_key[key] for row in rows if (key := beside.key(row)) in by_key}
        found.update(sums)
        out = next((row for row in sums if first.role[row] == OUTPUT and op < sums[row].record), None)
        if out is not None and first.ops[op].split(".")[-3] in PASSING:
            size = distances.elements(first.shape[out])
            for row in rows:
                if first.role[row] == INPUT and distances.elements(first.shape[row]) == size and row not in sums:
                    by_key.setdefault(beside.key(row), sums[out])  # the same tensor in another dtype
                    found[row] = sums[out]
    return found


def _pairs(beside: RankStack, op: int) -> Iterator[tuple[int, int]]:
    """Tensors that a collective takes in, and what becomes of each."""
    taken, given = beside.tensors(op, (INPUT,)), beside.tensors(op, (OUTPUT,))
    if len(taken) == 2 * len(given):  # reduce_scatter is given the tensor it writes into first
        taken = taken[len(given) :]
    return zip(taken, given)


def _whole(beside: RankStack, taken: int, given: int) -> Floats | None:
    """Statistics of the result; None when these ranks did not reduce with each other, or had nothing to."""
    first = beside.first
    if beside.alike[taken] or not (beside.everywhere[taken] and beside.everywhere[given]):
        return None
    size, result = distances.elements(first.shape[taken]), distances.elements(first.shape[given])
    if size == result and beside.alike[given]:
        return np.array(beside.stats[0, given])
    if result * len(beside.ranks) == size:
        return merge_statistics.merge_pieces(beside.stats[:, given])
    return None
