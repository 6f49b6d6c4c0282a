"""pass, warning and error of 26.2.0 for rows whose nodes belong together, with its reasons.

The checks are those of its tables (`find.verdicts.version_262`); in a graph they look at the values of the dump and not at texts of a
table, which makes some of them say something else:

* a golden 0 makes no relative error at all (in a table an infinite one);
* a dtype, a shape or ``requires_grad`` that one side does not have is not compared; but what the target has more of than its partner is
  off by all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from msprobe_engine.find.verdicts import version_262
from msprobe_engine.measure import factorize
from msprobe_engine.measure.comparable_dtypes import kind_of
from msprobe_engine.measure.distances import elements
from msprobe_engine.measure.factorize import Bools, Integers
from msprobe_engine.report.graph.nodes.model import Graph
from msprobe_engine.report.graph.nodes.rows import Floats, Numbers, PairedRows

PASS, WARNING, ERROR = 0, 1, 2
WORDS = ("pass", "warning", "error")
UNINITIALISED = frozenset(("empty", "empty_like", "empty_with_format", "new_empty_strided", "new_empty", "empty_strided"))
"""Calls whose result is not defined."""

_LEFT_OUT = UNINITIALISED | {"numpy", "to", "__setitem__"}
_INPUTS_LEFT_OUT = frozenset(("_reduce_scatter_base", "_all_gather_base", "all_to_all_single", "batch_isend_irecv"))
_SMALL, _LARGE, _TIMES, _NEW = 0.1, 0.5, 10, 0.1
"""Limits of the norms: of inputs that agree, of results that do not, how much a result may be worse than the inputs, and of one whose
inputs are equal."""
_ALIKE, _APART = 0.9, 0.1
"""Limits of the share of elements within one thousandth, and of the cosine: of inputs that agree; of results that do not, and of what a
cosine may lose."""


@dataclass
class Verdicts:
    """Attributes:
    levels: int8 (n,), `PASS`, `WARNING` or `ERROR` of each row.
    reasons: row -> what is wrong with it, in the order of the checks; of rows that pass nothing.
    """

    levels: npt.NDArray[np.int8]
    reasons: dict[int, list[str]] = field(default_factory=dict)


class Checks:
    """Runs the checks over rows.

    Args:
        graph: of the target.
        rows: beside those of the golden side.
        sharded: both sides are parallel jobs put together: shapes are not compared.
        meant: the sides are of two frameworks: dtypes are compared by what they mean, shapes by their sizes (a view more or less), and
            ``requires_grad`` not at all. 26.2.0 compares names, and all are off.
    """

    def __init__(self, graph: Graph, rows: PairedRows, sharded: bool = False, meant: bool = False) -> None:
        self.graph, self.rows, self.sharded, self.meant = graph, rows, sharded, meant
        self.found = Verdicts(np.zeros(len(rows), np.int8))
        n = len(rows.nodes)
        left_out, inputs_left_out = np.zeros(n, bool), np.zeros(n, bool)
        has_inputs = rows.largest((~rows.outputs).astype(np.float64)) > 0
        for at, node in enumerate(rows.nodes.tolist()):
            parts = graph.names[node].split(".", 2)
            if len(parts) > 1 and has_inputs[at]:
                api = parts[1].partition("_rank")[0] if sharded else parts[1]
                left_out[at], inputs_left_out[at] = api in _LEFT_OUT, api in _INPUTS_LEFT_OUT
        self.against_inputs = ~left_out & ~inputs_left_out
        self.looked_at = ~left_out[rows.group] & (rows.outputs | ~inputs_left_out[rows.group])

    def statistics(self, mine: Numbers, theirs: Numbers, norm: Floats) -> Verdicts:
        """By statistics; `norm`: float64 (n,), relative error of the norm as a fraction, NaN without one."""
        rows = self.rows
        self._finite(mine, theirs)
        known = np.where(np.isnan(norm), 0.0, norm)
        inside = rows.largest(np.where(rows.outputs, 0.0, known))
        outside = rows.largest(np.where(rows.outputs, known, 0.0))
        off = rows.outputs & (self.against_inputs & (inside < _SMALL))[rows.group] & (known > _LARGE)
        self._flag(off, ERROR, version_262.RELATIVE)
        self._facts()
        with np.errstate(all="ignore"):
            grown = np.where(inside == 0, outside > _NEW, outside / inside > _TIMES)
        self._first_output(self.against_inputs & grown, WARNING, version_262.TEN_TIMES)
        return self.found

    def tensors(self, mine: Numbers, theirs: Numbers, thousandth: Sequence[object], cosine: Sequence[object]) -> Verdicts:
        """By saved tensors; the cells of both metrics, one per row."""
        self._finite(mine, theirs)
        inside, outside = self._smallest(thousandth)
        self._first_output(self.against_inputs & (inside > _ALIKE) & (outside < _APART), ERROR, version_262.THOUSANDTH)
        self._facts()
        inside, outside = self._smallest(cosine)
        self._first_output(self.against_inputs & (inside > _ALIKE) & (inside - outside > _APART), WARNING, version_262.COSINE)
        return self.found

    def checksums(self, equal: Bools) -> Verdicts:
        """By checksums; `equal`: bool (n,)."""
        off = ~equal & self.looked_at
        self._flag(off & self.rows.matched, ERROR, version_262.CHECKSUM)
        self._flag(off & ~self.rows.matched, WARNING, version_262.NO_CHECKSUM)
        return self.found

    def _finite(self, mine: Numbers, theirs: Numbers) -> None:
        rows = self.rows
        other = theirs.bad_text[rows.right] if len(theirs.bad_text) else np.ones(len(rows), bool)
        self._flag(mine.bad_text[rows.left] & rows.matched & ~other & self.looked_at, ERROR, version_262.NOT_FINITE)

    def _facts(self) -> None:
        rows = self.rows
        first, second = rows.target, rows.golden
        right = np.where(rows.matched, rows.right, 0)
        alone = ~rows.matched
        mine = factorize.of_each(first.requires_grad, _grad, np.int64)[rows.left]
        theirs = factorize.of_each(second.requires_grad, _grad, np.int64)[right] if len(second) else np.zeros(len(rows), np.int64)
        if not self.meant:
            self._flag(np.where(alone, mine != 0, mine * theirs < 0) & self.looked_at, ERROR, version_262.REQUIRES_GRAD)
        scalars = np.zeros(len(rows), bool)
        both = factorize.mask(first.values, len(first))[rows.left] & rows.matched & ~rows.outputs & self.against_inputs[rows.group]
        if len(second):
            both &= factorize.mask(second.values, len(second))[right]
        for at in np.flatnonzero(both).tolist():
            i, j = int(rows.left[at]), int(rows.right[at])
            if first.shape[i] == [] and "class" in str(first.dtype[i]) and "class" in str(second.dtype[j]):
                scalars[at] = not _same(first.stats_of(i)[0], second.stats_of(j)[0])
        self._flag(scalars, ERROR, version_262.SCALAR)
        for words, other, text in ((first.dtype, second.dtype, version_262.DTYPE), (first.shape, second.shape, version_262.SHAPE)):
            if self.sharded and words is first.shape:
                continue
            there = factorize.of_each(words, lambda word: word is not None, bool)[rows.left]
            off = there & alone
            if len(second):
                there &= factorize.of_each(other, lambda word: word is not None, bool)[right]
                off |= there & rows.matched & self._unequal(words, other, right)
            if text is version_262.DTYPE:  # tensors that one side has as one and the other in parts
                for at in np.flatnonzero(off & rows.matched).tolist():
                    name = second.name[rows.right[at]]
                    off[at] = "qkv" not in name and "gate_up" not in name
            self._flag(off & self.looked_at, ERROR, text)

    def _unequal(self, words: Sequence[object], other: Sequence[object], right: Integers) -> Bools:
        if not self.meant:
            return factorize.unequal(words, other, self.rows.left, right)
        means = kind_of if words is self.rows.target.dtype else _size
        return factorize.unequal_by(means, words, other, self.rows.left, right)

    def _smallest(self, cells: Sequence[object]) -> tuple[Floats, Floats]:
        """The smallest number among the inputs and among the results of each node; 1 where there is none."""
        rows = self.rows
        values = np.fromiter(
            (float(cell) if isinstance(cell, (int, float)) and cell == cell else 1.0 for cell in cells),
            np.float64,
            len(rows),
        )
        values = np.minimum(values, 1.0)
        return rows.smallest(np.where(rows.outputs, 1.0, values)), rows.smallest(np.where(rows.outputs, values, 1.0))

    def _first_output(self, nodes: Bools, level: int, reason: str) -> None:
        rows = self.rows
        before = np.cumsum(rows.outputs)
        earlier = np.concatenate(([0], before))[rows.starts][rows.group] if len(rows) else before
        self._flag(rows.outputs & (before - earlier == 1) & nodes[rows.group], level, reason)

    def _flag(self, off: Bools, level: int, reason: str) -> None:
        self.found.levels[off] = np.maximum(self.found.levels[off], level)
        for at in np.flatnonzero(off).tolist():
            self.found.reasons.setdefault(at, []).append(reason)


def _size(shape: object) -> Hashable:
    """Elements of a shape; a text as it is."""
    return elements(shape) if isinstance(shape, list) else str(shape)


def _grad(required: bool | None) -> int:
    return 0 if required is None else 1 if required else -1


def _same(x: object, y: object) -> bool:
    """Two NaN are one text in the tables, and equal."""
    return bool(x == y) or (x != x and y != y)
