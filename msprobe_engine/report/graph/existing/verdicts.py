"""pass, warning and error of 26.2.0 for rows whose nodes belong together, with its reasons.

The checks are those of its tables (`find.verdicts.version_262`); in a graph they look at the values of the dump and not at texts of a
table, which makes some of them say something else:

* a golden 0 makes no relative error at all (in a table an infinite one);
* a dtype, a shape or ``requires_grad`` that one side does not have is not compared; but what the target has more of than its partner is
  off by all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from msprobe_engine.find.verdicts.version_262 import Checks, Facts, Verdicts
from msprobe_engine.measure import factorize
from msprobe_engine.measure.comparable_dtypes import kind_of
from msprobe_engine.measure.distances import elements
from msprobe_engine.measure.factorize import Bools, Integers
from msprobe_engine.report.graph.nodes.model import Graph
from msprobe_engine.report.graph.nodes.rows import Floats, Numbers, PairedRows


class GraphChecks:
    """Runs the checks over rows.

    Args:
        graph: of the target.
        rows: beside those of the golden side.
        sharded: both sides are parallel jobs put together: shapes are not compared.
        meant: the sides are of two frameworks: dtypes are compared by what they mean, shapes by their sizes (a view more or less), and
            ``requires_grad`` not at all. 26.2.0 compares names, and all are off.
    """

    def __init__(self, graph: Graph, rows: PairedRows, sharded: bool = False, meant: bool = False) -> None:
        self.rows, self.sharded, self.meant = rows, sharded, meant
        apis = []
        has_inputs = rows.largest((~rows.outputs).astype(np.float64)) > 0
        for at, node in enumerate(rows.nodes.tolist()):
            parts = graph.names[node].split(".", 2)
            api = parts[1] if len(parts) > 1 and has_inputs[at] else ""
            apis.append(api.partition("_rank")[0] if sharded else api)
        self._checks = Checks(rows.starts, rows.outputs, apis)

    def statistics(self, mine: Numbers, theirs: Numbers, norm: Floats) -> Verdicts:
        """By statistics; `norm`: float64 (n,), relative error of the norm as a fraction, NaN without one."""
        return self._checks.statistics(self._not_finite(mine, theirs), norm, norm, self._facts())

    def tensors(self, mine: Numbers, theirs: Numbers, thousandth: Sequence[object], cosine: Sequence[object]) -> Verdicts:
        """By saved tensors; the cells of both metrics, one per row."""
        return self._checks.tensors(self._not_finite(mine, theirs), thousandth, cosine, self._facts())

    def checksums(self, equal: Bools) -> Verdicts:
        """By checksums; `equal`: bool (n,)."""
        return self._checks.checksums(~equal, ~self.rows.matched)

    def _not_finite(self, mine: Numbers, theirs: Numbers) -> Bools:
        rows = self.rows
        other = theirs.bad_text[rows.right] if len(theirs.bad_text) else np.ones(len(rows), bool)
        return np.asarray(mine.bad_text[rows.left] & rows.matched & ~other)

    def _facts(self) -> Facts:
        rows = self.rows
        first, second = rows.target, rows.golden
        right = np.where(rows.matched, rows.right, 0)
        alone = ~rows.matched
        mine = factorize.of_each(first.requires_grad, _grad, np.int64)[rows.left]
        theirs = factorize.of_each(second.requires_grad, _grad, np.int64)[right] if len(second) else np.zeros(len(rows), np.int64)
        grads = np.zeros(len(rows), bool) if self.meant else np.where(alone, mine != 0, mine * theirs < 0)
        dtype = self._off(first.dtype, second.dtype, right)
        for at in np.flatnonzero(dtype & rows.matched).tolist():  # tensors that one side has as one and the other in parts
            name = second.name[rows.right[at]]
            dtype[at] = "qkv" not in name and "gate_up" not in name
        shape = np.zeros(len(rows), bool) if self.sharded else self._off(first.shape, second.shape, right)
        return Facts(grads, self._scalars(right), dtype, shape)

    def _scalars(self, right: Integers) -> Bools:
        """Numbers that are arguments, and differ."""
        rows = self.rows
        first, second = rows.target, rows.golden
        found = np.zeros(len(rows), bool)
        both = factorize.mask(first.values, len(first))[rows.left] & rows.matched & ~rows.outputs
        if len(second):
            both &= factorize.mask(second.values, len(second))[right]
        for at in np.flatnonzero(both).tolist():
            i, j = int(rows.left[at]), int(rows.right[at])
            if first.shape[i] == [] and "class" in str(first.dtype[i]) and "class" in str(second.dtype[j]):
                found[at] = not _same(first.stats_of(i)[0], second.stats_of(j)[0])
        return found

    def _off(self, words: Sequence[object], other: Sequence[object], right: Integers) -> Bools:
        """Dtypes or shapes that differ, or that a row without a partner has."""
        rows = self.rows
        there = factorize.of_each(words, lambda word: word is not None, bool)[rows.left]
        off = there & ~rows.matched
        if len(rows.golden):
            there &= factorize.of_each(other, lambda word: word is not None, bool)[right]
            off |= there & rows.matched & self._unequal(words, other, right)
        return np.asarray(off)

    def _unequal(self, words: Sequence[object], other: Sequence[object], right: Integers) -> Bools:
        if not self.meant:
            return factorize.unequal(words, other, self.rows.left, right)
        means = kind_of if words is self.rows.target.dtype else _size
        return factorize.unequal_by(means, words, other, self.rows.left, right)


def _size(shape: object) -> Hashable:
    """Elements of a shape; a text as it is."""
    return elements(shape) if isinstance(shape, list) else str(shape)


def _grad(required: bool | None) -> int:
    return 0 if required is None else 1 if required else -1


def _same(x: object, y: object) -> bool:
    """Two NaN are one text in the tables, and equal."""
    return bool(x == y) or (x != x and y != y)
