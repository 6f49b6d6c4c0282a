"""One side as it is aligned with another framework's: every record by what it means, how large its tensors are, and their numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.calls.call_tree import ROOT, Tree
from msprobe_engine.align.calls.strangers import NEAR
from msprobe_engine.align.frameworks import vocabulary
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable

_DIGITS = 3
Floats = npt.NDArray[np.float64]


class Terms:
    """The records of one side.

    Args:
        side: its names may have been changed by a mapping (`DumpTable.aliases`); then they are names of the other side.
        other: framework of the other side.
    """

    def __init__(self, side: DumpTable, other: str) -> None:
        self.side, self.tree = side, Tree(side)
        self.stats = side.stats
        own, other_words = vocabulary.vocabulary(side.framework), vocabulary.vocabulary(other)
        self.words = [_word(kind, own if name == op else other_words) for kind, name, op in zip(self.tree.kinds, self.tree.names, side.ops)]
        self._tensor = [isinstance(shape, list) for shape in side.shape]
        for row in side.values:
            self._tensor[row] = False

    def is_module(self, op: int) -> bool:
        """A record of a module's call."""
        return len(self.tree.kinds[op]) == 4

    def direction(self, op: int) -> str:
        """``forward``, ``backward``, ``parameters_grad``, ``debug`` or nothing."""
        return self.tree.kinds[op][0]

    def path(self, op: int) -> str:
        """Of a module: its path in the model."""
        return self.tree.kinds[op][2]

    def below(self, op: int) -> str:
        """A module's path below that of the module around it."""
        return self.tree.relative(op, self.tree.parents[op])[2]

    def children(self, op: int, direction: str) -> list[int]:
        """Calls of a direction right inside of a record, or at the top."""
        return [child for child in self.tree.children.get(op, ()) if self.direction(child) == direction]

    def rows(self, op: int, role: int) -> list[int]:
        """Tensors of a record that play a role."""
        side = self.side
        return [row for row in side.rows(op) if side.role[row] == role and self._tensor[row]]

    def plain(self, op: int) -> list[int]:
        """Rows of arguments and results that are no tensors."""
        side = self.side
        return [row for row in side.rows(op) if not self._tensor[row] and side.role[row] in (INPUT, OUTPUT)]

    def value(self, row: int) -> str:
        """Text of an argument that is no tensor; of nothing (null) too."""
        return repr(self.side.values.get(row))

    def place(self, row: int) -> str:
        """Where in its record a row stands (``.input.0``)."""
        side = self.side
        return side.positions.get(row, side.name[row][len(side.ops[side.op[row]]) :])

    def size(self, row: int) -> int:
        """Elements of a tensor."""
        shape = self.side.shape[row]
        return int(math.prod(shape)) if all(isinstance(n, int) for n in shape) else -1

    def sizes(self, op: int, role: int) -> tuple[int, ...]:
        """Elements of the tensors of a record that play a role."""
        return tuple(self.size(row) for row in self.rows(op, role))

    def moves(self, op: int) -> bool:
        """The call computes nothing, or gives no tensor."""
        return not self.is_module(op) and (vocabulary.moves(self.words[op]) or not self.rows(op, OUTPUT))

    def hands_on(self, op: int) -> bool:
        """The numbers of all that a call gives out are numbers of a tensor that it takes in: dropout that is off, a cast."""
        given = self.rows(op, OUTPUT)
        taken = self.rows(op, INPUT)
        return bool(given) and all(any(self.same(row, other) for other in taken) for row in given)

    def same(self, row: int, other: int) -> bool:
        """Two tensors of this side are one, maybe in another shape."""
        return self.size(row) == self.size(other) and near(self.stats[row], self.stats[other], 1e-6)

    def mark(self, row: int) -> Hashable:
        """Numbers of a tensor to three digits: equal on both sides but for round-off, as a rule. None without numbers."""
        numbers = self.stats[row][[0, 1, 3]]
        if np.isnan(numbers).any():
            odd = self.side.nonfloat_stats.get(row)
            return None if odd is None else repr(odd)
        return tuple(f"{value:.{_DIGITS - 1}e}" if value else "0" for value in numbers.tolist())

    def marks(self, op: int) -> Hashable:
        """`mark` of what a record gives out; None when one has no numbers, or there is none."""
        marks = tuple(self.mark(row) for row in self.rows(op, OUTPUT))
        return None if not marks or None in marks else marks

    def maker(self, row: int) -> int | None:
        """The call that has made the numbers of a row, looked through calls that compute nothing."""
        source = self.tree.producers.get(row)
        while source is not None and self.moves(source):
            taken = self.rows(source, INPUT)
            before = self.tree.producers.get(taken[0]) if taken else None
            if before is None or before >= source:
                break
            source = before
        return source

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Path of a module -> elements of its own parameters, as any record of it shows them."""
        elements: dict[str, int] = {}
        for op, kind in enumerate(self.tree.kinds):
            if len(kind) == 4:
                sizes = [self.size(row) for role in (PARAMETERS, PARAMETERS_GRAD) for row in self.rows(op, role)]
                elements[kind[2]] = max(elements.get(kind[2], 0), sum(sizes))
        return elements

    @cached_property
    def elements_of_modules(self) -> dict[str, int]:
        """Path of a module -> elements of all parameters in it."""
        elements: dict[str, int] = {}
        for path, number in self.parameters.items():
            parts = path.split(".")
            for cut in range(1, len(parts) + 1):
                place = ".".join(parts[:cut])
                elements[place] = elements.get(place, 0) + number
        return elements

    def twin(self, op: int) -> int | None:
        """The backward call of a forward call."""
        head, _, tail = self.side.ops[op].rpartition("forward")
        return self.tree.index.get(f"{head}backward{tail}")

    @cached_property
    def has_forward(self) -> bool:
        """Forward calls were recorded."""
        return any(kind[0] == "forward" for kind in self.tree.kinds)

    @property
    def roots(self) -> list[int]:
        """Where the walk begins."""
        return [ROOT]


def near(target: Floats, golden: Floats, tolerance: float = NEAR) -> bool:
    """Two rows of statistics (Max, Min, Mean, Norm) say the same but for a tolerance, relative to the tensor."""
    with np.errstate(all="ignore"):
        difference = np.abs(target - golden)[[0, 1, 3]]
        difference[target[[0, 1, 3]] == golden[[0, 1, 3]]] = 0.0  # infinities
        scale = float(np.maximum(np.abs(target), np.abs(golden))[[0, 1, 3]].max(initial=0.0))
        return bool((difference <= tolerance * scale).all())


def of_row(terms: Terms, row: int, record: str) -> str:
    """What a parameter's row is called in PyTorch: the name of the parameter."""
    name = terms.side.name[row][len(record) + 1 :]
    return vocabulary.of_parameter(name.removeprefix("parameters."))


def _word(kind: Sequence[str], framework: str) -> str:
    if len(kind) == 4:
        return vocabulary.of_class(kind[3])
    if len(kind) == 3:
        return vocabulary.of_function(kind[1], kind[2], framework)
    return kind[-1]
