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

    def statistics(self, target_numbers: Numbers, golden_numbers: Numbers, norm: Floats) -> Verdicts:
        """By statistics; `norm`: float64 (n,), relative error of the norm as a fraction, NaN without one."""
        return self._checks.statistics(self._not_finite(target_numbers, golden_numbers), norm, norm, self._facts())

    def tensors(self, target_numbers: Numbers, golden_numbers: Numbers, thousandth: Sequence[object], cosine: Sequence[object]) -> Verdicts:
        """By saved tensors; the cells of both metrics, one per row."""
        return self._checks.tensors(self._not_finite(target_numbers, golden_numbers), thousandth, cosine, self._facts())

    def checksums(self, equal: Bools) -> Verdicts:
        """By checksums; `equal`: bool (n,)."""
        return self._checks.checksums(~equal, ~self.rows.matched)

    def _not_finite(self, target_numbers: Numbers, golden_numbers: Numbers) -> Bools:
        rows = self.rows
        golden_bad = golden_numbers.bad_text[rows.golden_rows] if len(golden_numbers.bad_text) else np.ones(len(rows), bool)
        return np.asarray(target_numbers.bad_text[rows.target_rows] & rows.matched & ~golden_bad)

    def _facts(self) -> Facts:
        rows = self.rows
        target, golden = rows.target, rows.golden
        golden_rows = np.where(rows.matched, rows.golden_rows, 0)
        alone = ~rows.matched
        target_grads = factorize.of_each(target.requires_grad, _grad, np.int64)[rows.target_rows]
        golden_grads = (
            factorize.of_each(golden.requires_grad, _grad, np.int64)[golden_rows] if len(golden) else np.zeros(len(rows), np.int64)
        )
        grads = np.zeros(len(rows), bool) if self.meant else np.where(alone, target_grads != 0, target_grads * golden_grads < 0)
        dtype = self._off(target.dtype, golden.dtype, golden_rows)
        for position in np.flatnonzero(dtype & rows.matched).tolist():  # tensors that one side has as one and the other in parts
            name = golden.name[rows.golden_rows[position]]
            dtype[position] = "qkv" not in name and "gate_up" not in name
        shape = np.zeros(len(rows), bool) if self.sharded else self._off(target.shape, golden.shape, golden_rows)
        return Facts(grads, self._scalars(golden_rows), dtype, shape)

    def _scalars(self, golden_rows: Integers) -> Bools:
        """Numbers that are arguments, and differ."""
        rows = self.rows
        target, golden = rows.target, rows.golden
        unequal = np.zeros(len(rows), bool)
        scalars = factorize.mask(target.values, len(target))[rows.target_rows] & rows.matched & ~rows.outputs
        if len(golden):
            scalars &= factorize.mask(golden.values, len(golden))[golden_rows]
        for position in np.flatnonzero(scalars).tolist():
            i, j = int(rows.target_rows[position]), int(rows.golden_rows[position])
            if target.shape[i] == [] and "class" in str(target.dtype[i]) and "class" in str(golden.dtype[j]):
                unequal[position] = not _same(target.stats_of(i)[0], golden.stats_of(j)[0])
        return unequal

    def _off(self, target_words: Sequence[object], golden_words: Sequence[object], golden_rows: Integers) -> Bools:
        """Dtypes or shapes that differ, or that a row without a partner has."""
        rows = self.rows
        present = factorize.of_each(target_words, lambda word: word is not None, bool)[rows.target_rows]
        off = present & ~rows.matched
        if len(rows.golden):
            present &= factorize.of_each(golden_words, lambda word: word is not None, bool)[golden_rows]
            off |= present & rows.matched & self._unequal(target_words, golden_words, golden_rows)
        return np.asarray(off)

    def _unequal(self, target_words: Sequence[object], golden_words: Sequence[object], golden_rows: Integers) -> Bools:
        if not self.meant:
            return factorize.unequal(target_words, golden_words, self.rows.target_rows, golden_rows)
        means = kind_of if target_words is self.rows.target.dtype else _size
        return factorize.unequal_by(means, target_words, golden_words, self.rows.target_rows, golden_rows)


def _size(shape: object) -> Hashable:
    """Elements of a shape; a text as it is."""
    return elements(shape) if isinstance(shape, list) else str(shape)


def _grad(required: bool | None) -> int:
    return 0 if required is None else 1 if required else -1


def _same(target: object, golden: object) -> bool:
    """Two NaN are one text in the tables, and equal."""
    return bool(target == golden) or (target != target and golden != golden)
