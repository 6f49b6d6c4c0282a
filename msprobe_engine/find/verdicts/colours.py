"""Colours of the rows of 8.1.1 (statistics and tensors), and why a row has one.

Every row is looked at by itself; outputs are also set against each input and parameter of their record, and a reason is repeated once per
input that gives it. Red wins. The limits and words are those of that version.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS
from msprobe_engine.measure.columns import COSINE, DIFFERENCES, GOLDEN_STATS, MAX_ABS, ONE_THOUSANDTH, TARGET_STATS, Block

RED, YELLOW = "red", "yellow"
NOT_FINITE = "maximum or minimum is nan, -inf, or inf"
HUGE = "maximum absolute error exceeds 1e+10"
RELATIVE = "maximum relative error exceeds 0.5"
RELATIVE_GROWN = "The output's maximum relative error exceeds 0.1, while the input/parameter's is below 0.01"
MAGNITUDE = "maximum absolute error of both input/parameters and output exceed 1, with the output larger by an order of magnitude"
THOUSANDTH = "The input/parameter's one thousandth err ratio exceeds 0.9, while the output's is below 0.6"
THOUSANDTH_FALLEN = "The output's one thousandth err ratio decreases by more than 0.1 compared to the input/parameter's"
COSINE_FALLEN = "The output's cosine decreases by more than 0.1 compared to the input/parameter's"

_EPSILON = float(np.finfo(float).eps)
_OVERFLOW = frozenset(("nan", "inf", "-inf", "nan\t", "inf\t", "-inf\t"))


class Highlight:
    """Colours the rows of whole records.

    Args:
        block: the cells.
        op: record of each row; equal ones stand together.
        role: of each row, as a `DumpTable` has them.
        tensors: the block has metrics of tensors in place of differences.
    """

    def __init__(self, block: Block, op: npt.NDArray[np.int64], role: Sequence[int], tensors: bool) -> None:
        self._maximum, self._minimum = block[TARGET_STATS[0]], block[TARGET_STATS[1]]
        self._golden = block[GOLDEN_STATS[0]]
        self._difference = block[MAX_ABS if tensors else DIFFERENCES[0]]
        self._cosine = block[COSINE] if tensors else None
        self._thousandth = block[ONE_THOUSANDTH] if tensors else None
        self._op, self._role = op, role
        self._red: dict[int, list[str]] = {}
        self._yellow: dict[int, list[str]] = {}

    def run(self, messages: list[str]) -> tuple[list[str], list[str]]:
        """(colours, messages with the reasons appended, one per line)."""
        for row, (high, low, difference) in enumerate(zip(self._maximum, self._minimum, self._difference)):
            if str(high) in _OVERFLOW or str(low) in _OVERFLOW:
                self._red.setdefault(row, []).append(NOT_FINITE)
            elif _number(difference) and abs(difference) > 1e10:
                self._red.setdefault(row, []).append(HUGE)
        starts = [0, *(np.flatnonzero(np.diff(self._op)) + 1).tolist(), len(self._op)]
        for start, end in itertools.pairwise(starts):
            self._record(start, end)
        colours = [""] * len(messages)
        said = list(messages)
        for reasons, colour in ((self._red, RED), (self._yellow, YELLOW)):
            for row, lines in reasons.items():
                if not colours[row]:
                    colours[row] = colour
                    said[row] = "\n".join([said[row], *lines] if said[row] else lines)
        return colours, said

    def _record(self, start: int, end: int) -> None:
        """The first row counts as an input whatever it is; the existing tool begins a record so."""
        inputs = [row for row in range(start, end) if row == start or self._role[row] in (INPUT, PARAMETERS)]
        outputs = [row for row in range(start + 1, end) if self._role[row] == OUTPUT]
        for row in outputs:
            if self._numeric(row) and self._could(row):
                for other in inputs:
                    if self._numeric(other):
                        self._compare(other, row)

    def _numeric(self, row: int) -> bool:
        return _number(self._maximum[row]) and _number(self._golden[row]) and _number(self._difference[row])

    def _could(self, row: int) -> bool:
        """A result that no rule can hit whatever the inputs are like is not looked at further."""
        if abs(self._difference[row]) >= 10:
            return True
        if self._thousandth is None:
            return self._relative(row) > 0.1
        assert self._cosine is not None
        ratio, cosine = self._thousandth[row], self._cosine[row]
        return (_number(ratio) and ratio < 0.95) or (_number(cosine) and cosine < 0.95)

    def _relative(self, row: int) -> float:
        with np.errstate(all="ignore"):
            return float(abs(np.float64(self._difference[row]) / max(_EPSILON, self._golden[row])))

    def _compare(self, inner: int, outer: int) -> None:
        before, after = abs(self._difference[inner]), abs(self._difference[outer])
        if before <= after and _order(after) - _order(before) >= 1:
            self._yellow.setdefault(outer, []).append(MAGNITUDE)
        if self._thousandth is None:
            relative = self._relative(outer)
            if relative > 0.5:
                self._red.setdefault(outer, []).append(RELATIVE)
            elif relative > 0.1 and self._relative(inner) < 0.01:
                self._yellow.setdefault(outer, []).append(RELATIVE_GROWN)
            return
        assert self._cosine is not None
        before_value, after_value = self._thousandth[inner], self._thousandth[outer]
        if _number(before_value) and _number(after_value):
            if before_value > 0.9 and after_value < 0.6:
                self._red.setdefault(outer, []).append(THOUSANDTH)
            elif before_value - after_value > 0.1:
                self._yellow.setdefault(outer, []).append(THOUSANDTH_FALLEN)
        before_value, after_value = self._cosine[inner], self._cosine[outer]
        if _number(before_value) and _number(after_value) and before_value - after_value > 0.1:
            self._yellow.setdefault(outer, []).append(COSINE_FALLEN)


def _number(cell: Any) -> bool:
    return isinstance(cell, (int, float))


def _order(value: float) -> float:
    return 0.0 if value < 1 else math.log10(value)
