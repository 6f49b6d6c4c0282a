"""Where the ranks have cut a tensor, so that the shape of the whole can be told.

Parameters say it in the header of the dump, DTensors in their placements. From there it follows through the calls: a product is cut where
its factors are, an element-wise call where its argument is, gradients as what they are gradients of. A call of which nothing is known hands
on what fits the shapes; where nothing fits, the shape stays that of the piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from msprobe_engine.align.parallel.placements import Placements, twins
from msprobe_engine.core.operator_traits import PRODUCTS
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, DumpTable
from msprobe_engine.report.graph.merge.rank_stack import RankStack

_SWAPS = frozenset(("transpose", "t", "swapaxes", "swapdims"))
_ORDERS = _SWAPS | {"permute"}


class Cut(NamedTuple):
    """Attributes:
    dimension: along which each rank has a piece.
    groups: how often the pieces alternate along it: 1 where the first rank has the first elements; heads of several samples that were
        made one dimension are cut once for each sample.
    """

    dimension: int
    groups: int = 1


class Told:
    """What the dump itself says of the whole of a tensor."""

    def __init__(self, beside: RankStack) -> None:
        self._side, self._placements = beside.first, Placements(beside.tree, one_stage=True)

    def whole(self, row: int) -> list[int] | None:
        """Shape of the whole; None when nothing is said of it."""
        return self._placements.of_parameter(row) or self._placements.whole(row)

    def is_cut(self, row: int) -> bool:
        """The dump says that this is a piece."""
        whole = self.whole(row)
        return whole is not None and whole != self._side.shape[row]

    def is_whole(self, row: int) -> bool:
        """A parameter of which the dump says that each rank holds all of it."""
        return self._side.role[row] == PARAMETERS and self._placements.of_parameter(row) == self._side.shape[row]


def cuts(beside: RankStack, told: Told, rows: Sequence[int]) -> dict[int, Cut]:
    """Row -> where it is cut.

    Args:
        told: what the dump says.
        rows: tensors that are pieces, in order. Constants that a call makes of a piece, all zeros mostly, are found besides.
    """
    return _Walk(beside, told, rows).found


class _Walk:
    """Goes through the pieces in the order of the records, which is that of the calls: what goes in was cut before it is taken in."""

    def __init__(self, beside: RankStack, of_dump: Told, rows: Sequence[int]) -> None:
        self.beside, self.side, self.of_dump = beside, beside.first, of_dump
        self.twins = twins(beside.tree)
        self.known: dict[tuple[bytes, tuple[int, ...]], Cut] = {}
        self.found: dict[int, Cut] = {}
        pieces = set(rows)
        waiting = []
        for op in range(len(self.side.ops)):
            constants = []
            if op in self.side.collectives:
                self.note_exchange(op, pieces)
            for row in self.side.rows(op):
                if row in pieces and row not in self.found:
                    self.store_cut(row, self.cut_of(row))
                    if row not in self.found:
                        waiting.append(row)
                elif row not in pieces and self.is_constant(row):
                    constants.append(row)
            for row in constants:
                self.note_constant(row)
        for row in waiting:  # gradients come before, and modules behind, what says how they are cut
            self.store_cut(row, self.find_known_cut(row))

    def cut_of(self, row: int) -> Cut | None:
        """Of a row whose record was reached: what the dump says of parameters, what the last call said that gave the tensor out, what a
        call makes of its arguments. A square matrix and its transpose have the same numbers and the same shape."""
        role, op = self.side.role[row], self.side.op[row]
        if role == PARAMETERS or (role == INPUT and self.beside.tree.children.get(op)):  # what ran inside may have turned it
            return self.find_stated_cut(row) or self.find_known_cut(row)
        if role == OUTPUT and row not in self.twins:
            return (
                (self.through(row) if self.name(op) in _ORDERS else None)
                or self.find_known_cut(row)
                or self.find_stated_cut(row)
                or self.through(row)
            )
        return self.find_known_cut(row) or self.find_stated_cut(row)

    def note_exchange(self, op: int, pieces: set[int]) -> None:
        """A gathering collective takes in a piece of what it gives out, a scattering one gives out a piece of what it takes in."""
        taken, given = (self.beside.tensors(op, (role,)) for role in (INPUT, OUTPUT))
        for one in taken:
            for other in given:
                for piece, whole in ((one, other), (other, one)):
                    cut = _piece_of(self.side.shape[piece], self.side.shape[whole], len(self.beside.ranks))
                    if cut is not None and piece in pieces:
                        self.store_cut(piece, cut)

    def is_constant(self, row: int) -> bool:
        """All elements are one number, the same on all ranks: of such a tensor only the call that made it can tell that it is a piece."""
        if not self.beside.tensor[row] or self.side.role[row] != OUTPUT:
            return False
        stats = self.beside.stats[0, row]
        return bool(stats[0] == stats[1] and self.beside.alike[row] and self.side.shape[row])

    def note_constant(self, row: int) -> None:
        op = self.side.op[row]
        if op in self.side.collectives:
            return
        for one in self.beside.tensors(op, (INPUT, PARAMETERS)):
            if one in self.found and self.side.shape[one] == self.side.shape[row]:
                self.found[row] = self.found[one]
                return

    def store_cut(self, row: int, cut: Cut | None) -> None:
        if cut is not None and 0 <= cut.dimension < len(self.side.shape[row]):
            self.found[row] = cut
            self.known[self.beside.key(row), tuple(self.side.shape[row])] = cut

    def find_known_cut(self, row: int) -> Cut | None:
        return self.known.get((self.beside.key(row), tuple(self.side.shape[row])))

    def find_stated_cut(self, row: int) -> Cut | None:
        """What the dump says, or what is known of the tensor that this one is the gradient of."""
        shape = self.side.shape[row]
        whole = self.of_dump.whole(row)
        if whole is not None:
            return next((Cut(d) for d, (piece_size, whole_size) in enumerate(zip(shape, whole)) if piece_size != whole_size), None)
        sizes = self.beside.shapes(row)
        if len({len(size) for size in sizes}) == 1:  # not cut evenly: the sizes say where
            other = [d for d, of_all in enumerate(zip(*sizes)) if len(set(of_all)) > 1]
            if len(other) == 1:
                return Cut(other[0])
        twin = self.twins.get(row)
        return self.found.get(twin) if twin is not None and self.side.shape[twin] == shape else None

    def name(self, op: int) -> str:
        """Of a function; of anything else some part of its name."""
        parts = self.side.ops[op].split(".")
        return parts[-3] if len(parts) > 3 else ""

    def through(self, row: int) -> Cut | None:
        """Of what a call gives out, by what goes in."""
        op = self.side.op[row]
        name = self.name(op)
        taken = self.beside.tensors(op, (INPUT, PARAMETERS))
        if name in PRODUCTS:
            return self.product(taken, row, transposed=name == "linear")
        if name == "embedding":
            return self.looked_up(taken, row)
        for one in taken:
            if one in self.found:
                cut = self.move_cut(name, one, row)
                if cut is not None:
                    return cut
        return None

    def product(self, taken: Sequence[int], out: int, transposed: bool) -> Cut | None:
        """A matrix product: cut where the rows of the first or the columns of the second factor are. (Cut in between, it is a sum.)"""
        if len(taken) == 3 and not transposed:
            taken = taken[1:]  # what is added
        if len(taken) < 2:
            return None
        size, columns = len(self.side.shape[out]), len(self.side.shape[taken[1]])
        cut = self.found.get(taken[0])
        if cut is not None and cut.dimension < len(self.side.shape[taken[0]]) - 1:
            return cut
        cut = self.found.get(taken[1])
        if cut is None:
            return None
        if cut.dimension == (0 if transposed else columns - 1):
            return Cut(size - 1, cut.groups)
        return cut if not transposed and cut.dimension < columns - 2 else None

    def looked_up(self, taken: Sequence[int], out: int) -> Cut | None:
        """Rows of a table: cut where the indices are, or where the columns of the table are. (Of a table cut by rows it is a sum.)"""
        if len(taken) < 2:
            return None
        if taken[0] in self.found:
            return self.found[taken[0]]
        cut = self.found.get(taken[1])
        return Cut(len(self.side.shape[out]) - 1, cut.groups) if cut is not None and cut.dimension == 1 else None

    def move_cut(self, name: str, taken: int, out: int) -> Cut | None:
        """Where the cut of an argument is in the result of any other call."""
        cut, before, after = self.found[taken], self.side.shape[taken], self.side.shape[out]
        if name in _ORDERS:
            order = self.order(name, taken, len(before))
            return Cut(order.index(cut.dimension), cut.groups) if order is not None and len(after) == len(before) else None
        if math.prod(before) == math.prod(after):
            return _reshape_cut(cut, before, after)
        at = cut.dimension + max(len(after) - len(before), 0)  # aligned at the right, as broadcasting does
        if len(after) < len(before) or before[cut.dimension] != after[at]:
            return None
        return Cut(at, cut.groups)

    def order(self, name: str, row: int, size: int) -> list[int] | None:
        """Which dimension of the argument each one of the result is, by the arguments of the call."""
        numbers = _numbers(self.side, self.side.op[row])
        if name == "permute":
            order = [n % size for n in numbers] if size else []
            return order if sorted(order) == list(range(size)) else None
        if size < 2:
            return None
        first, second = (numbers[0] % size, numbers[1] % size) if len(numbers) == 2 else (0, 1)
        order = list(range(size))
        order[first], order[second] = order[second], order[first]
        return order


def _numbers(side: DumpTable, op: int) -> list[int]:
    """Whole numbers among the arguments of a call, also those of a list."""
    numbers: list[int] = []
    for row in side.rows(op):
        value: Any = side.values.get(row)
        if side.role[row] == INPUT:
            numbers += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if type(item) is int]
    return numbers


def _reshape_cut(cut: Cut, before: Sequence[int], after: Sequence[int]) -> Cut | None:
    """In a new shape the pieces lie in the dimension in which elements are as far apart as before."""
    if list(before) == list(after):
        return cut
    ahead, so_far = math.prod(before[: cut.dimension]) * cut.groups, 1
    for d, size in enumerate(after):
        if so_far * size > ahead:
            return Cut(d, ahead // so_far) if ahead % so_far == 0 else None
        so_far *= size
    return None


def _piece_of(piece: Sequence[int], whole: Sequence[int], ranks: int) -> Cut | None:
    other = [d for d, (piece_size, whole_size) in enumerate(zip(piece, whole)) if piece_size != whole_size]
    return Cut(other[0]) if len(piece) == len(whole) and len(other) == 1 and piece[other[0]] * ranks == whole[other[0]] else None
