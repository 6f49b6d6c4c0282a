"""Values of pairs of rows, reduced to one per pair of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from msprobe_engine.measure.distances import Floats
from msprobe_engine.measure.factorize import Bools, Integers


@dataclass
class RecordSums:
    """Of each pair of records; positions are of pairs of rows, -1: none.

    Attributes:
        inner, outer: largest distance of what goes in (arguments that are no tensors left out) and of what comes out.
        worst_out: where that of what comes out is.
        bad_out: the first output that is not finite and should be; `bad_in`: something that goes in is not finite.
        argument: the first argument that is another one.
        known: something that comes out could be compared.
        counts: the result is defined.
        behind: largest distance of what the result is made of and the record does not say.
        excused: largest distance that goes in and is excused; statistics of what comes out may not show it, those of parts of it will.
    """

    inner: Floats
    outer: Floats
    worst_out: Integers
    bad_out: Integers
    argument: Integers
    bad_in: Bools
    known: Bools
    counts: Bools
    behind: list[float]
    excused: list[float]

    @property
    def moved(self) -> Bools:
        """There is a difference. No other record can be an origin, or pass a difference on."""
        return np.asarray((self.inner > 0) | (self.outer > 0) | (self.bad_out >= 0))


class SegmentReduce:
    """Reduces values of pairs of rows to one per pair of records; `starts` as `distances.paired_rows` gives them."""

    def __init__(self, starts: Sequence[int]) -> None:
        ends = np.array(starts, np.int64)
        self._counts = np.diff(ends)
        self._some = self._counts > 0
        self._starts = ends[:-1][self._some]

    def largest(self, values: Floats) -> Floats:
        """The largest value, at least 0."""
        maxima = np.zeros(len(self._counts))
        if len(self._starts):
            maxima[self._some] = np.maximum(np.fmax.reduceat(values, self._starts), 0.0)
        return maxima

    def place_of(self, largest: Floats, values: Floats) -> Integers:
        """Where the first of the largest values is, of those above 0."""
        return self.first((values > 0) & (values == np.repeat(largest, self._counts)))

    def first(self, where: Bools) -> Integers:
        """Position of the first True, -1 without one."""
        positions = np.full(len(self._counts), -1)
        where_true = np.flatnonzero(where)[::-1]
        positions[np.repeat(np.arange(len(positions)), self._counts)[where_true]] = where_true  # the last one written is the first one
        return positions

    def any(self, where: Bools) -> Bools:
        """At least one True."""
        return np.asarray(self.first(where) >= 0)
