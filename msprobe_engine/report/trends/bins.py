"""Steps and ranks as columns of bounded number, and rows of numbers as their extremes in these columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
_SPAN = 4_000_000
"""Steps between the first and the last one up to which tables are made of them."""


def distinct(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers that occur, ascending; without sorting where they lie close to each other."""
    if not len(numbers):
        return numbers
    low, high = int(numbers.min()), int(numbers.max())
    if high - low > min(_SPAN, 4 * len(numbers)):
        return np.unique(numbers)
    there = np.zeros(high - low + 1, bool)
    there[numbers - low] = True
    return np.flatnonzero(there) + low


@dataclass(frozen=True)
class Bins:
    """Numbers (steps, or ranks), ascending, in groups of neighbours.

    Attributes:
        first, last: of every group, int64 [n].
        of: how many numbers there are.
    """

    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    of: int

    @classmethod
    def even(cls, numbers: npt.NDArray[np.int64], count: int) -> Bins:
        """Groups of as equal size as possible, at most `count`; every number by itself where there are no more."""
        if not len(numbers):
            return cls(numbers, numbers, 0)
        cuts = np.linspace(0, len(numbers), min(count, len(numbers)) + 1).astype(np.int64)
        return cls(numbers[cuts[:-1]], numbers[cuts[1:] - 1], len(numbers))

    def every(self, count: int) -> Bins:
        """`count` neighbouring groups as one."""
        starts = np.arange(0, len(self.first), count)
        return Bins(self.first[starts], self.last[np.minimum(starts + count, len(self.last)) - 1], self.of)

    def place(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The group of each number; all of them have to be in one."""
        table = self._table
        return table[numbers - self.first[0]] if table is not None else np.searchsorted(self.first, numbers, "right") - 1

    @cached_property
    def _table(self) -> npt.NDArray[np.int64] | None:
        """Number less the first to its group, where that is no large table."""
        if not len(self.first) or int(self.last[-1]) - int(self.first[0]) > _SPAN:
            return None
        numbers = np.arange(self.first[0], self.last[-1] + 1)
        return np.searchsorted(self.first, numbers, "right") - 1

    @property
    def single(self) -> bool:
        """Every number is a group by itself."""
        return len(self.first) == self.of

    def __len__(self) -> int:
        return len(self.first)


class Extremes:
    """The largest and the smallest number of every cell of a grid.

    NaN wins over every number, infinities over finite ones, so that nothing that is not finite gets lost in a cell. A cell without
    numbers has ``-inf`` as largest and ``+inf`` as smallest; `missing` says which they are.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.high = np.full(shape, -np.inf)
        self.low = np.full(shape, np.inf)

    def add(self, cells: npt.NDArray[np.int64], values: Numbers) -> None:
        """Take numbers into cells, given by their flat index."""
        if not len(cells):
            return
        # Rows of a cell mostly follow each other, as files are in the order of the steps: they are put together first.
        begins = np.flatnonzero(np.concatenate([[True], cells[1:] != cells[:-1]]))
        own_cells = cells[begins]
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            np.maximum.at(self.high.reshape(-1), own_cells, np.maximum.reduceat(values, begins))
            np.minimum.at(self.low.reshape(-1), own_cells, np.minimum.reduceat(values, begins))

    @property
    def missing(self) -> npt.NDArray[np.bool_]:
        """Cells without numbers."""
        return np.asarray((self.high == -np.inf) & (self.low == np.inf))


class Sums:
    """A sum of the numbers of each cell in which every step and rank has a weight of its own: of two runs, what the extremes of a cell do
    not show, such as two ranks that have changed places.

    Attributes:
        total: of the finite numbers; `weight`: of all numbers, `bad`: of those that are not finite.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.total, self.weight, self.bad = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def add(self, cells: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], rank: int, values: Numbers) -> None:
        """Take numbers of one rank into cells, given by their flat index."""
        weights = 0.5 + ((steps * 2_654_435_761 + rank * 40_503 + 12_345) * 2_246_822_519 % 1_000_003) / 1_000_003
        finite = np.isfinite(values)
        for into, numbers in (
            (self.total, np.where(finite, values, 0.0) * weights),
            (self.weight, weights),
            (self.bad, np.where(finite, 0.0, weights)),
        ):
            np.add.at(into.reshape(-1), cells, numbers)

    def distance(self, other: Sums, size: Numbers, not_equal: float) -> Numbers:
        """How far the numbers of the cells are apart, as a share of `size`, about; NaN where not both have the same steps and ranks.

        Args:
            not_equal: what to say where not the same numbers are finite.
        """
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            off = np.abs(self.total - other.total)
            out = np.where(off == 0, 0.0, off / (size * np.sqrt(np.maximum(self.weight, 1.0))))
        out = np.where(np.isclose(self.bad, other.bad), out, not_equal)
        return np.where(self.of_the_same(other) & ~np.isnan(out), out, np.nan)

    def of_the_same(self, other: Sums) -> npt.NDArray[np.bool_]:
        """Cells with numbers of the same steps and ranks."""
        return np.isclose(self.weight, other.weight)
