"""pass, warning and error as 26.2.0 gives them to the rows of its tables and graphs, row by row within each record, with its reasons.

The checks, their limits and which calls are left out are facts of that version (`docs/reference/compatibility.md` has what is wrong with
them); the words of the reasons are part of its format. `Checks` is what tables and graphs have in common; a table looks at texts, a graph
at the values of the dump (`report.graph.existing.verdicts`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.measure.columns import UNMATCHED

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

PASS, WARNING, ERROR = range(3)
WORDS = ("pass", "warning", "error")

UNINITIALISED = frozenset(("empty", "empty_like", "empty_with_format", "new_empty_strided", "new_empty", "empty_strided"))
"""Calls whose result is not defined, as that version knows them."""
_LEFT_OUT = UNINITIALISED | {"numpy", "to", "__setitem__"}
_INPUTS_LEFT_OUT = frozenset(("_reduce_scatter_base", "_all_gather_base", "all_to_all_single", "batch_isend_irecv"))

_SMALL, _LARGE, _TIMES, _NEW = 0.1, 0.5, 10, 0.1
"""Limits of the norms: of inputs that agree, of results that do not, how much a result may be worse than the inputs, and of one whose
inputs are equal."""
_ALIKE, _APART = 0.9, 0.1
"""Limits of the share of elements within one thousandth, and of the cosine: of inputs that agree; of results that do not, and of what a
cosine may lose."""

NOT_FINITE = "error: There is nan/inf/-inf in the maximum or minimum value of NPU."
RELATIVE = "error: The NormRelativeErr of output is greater than 0.5."
THOUSANDTH = "error: The input/parameters of One Thousandth Err Ratio > 0.9 while the output < 0.6."
REQUIRES_GRAD = "error: The Required_Grad of NPU and Bench are inconsistent"
SCALAR = "error: The scalar parameters of NPU and Bench are inconsistent."
DTYPE = "error: The dtype of NPU and Bench are inconsistent."
SHAPE = "error: The shape of NPU and Bench are inconsistent."
TEN_TIMES = "warning: The norm relative error of output is 10 times that of input."
COSINE = "warning: The input/parameters of Cosine > 0.9, and input/parameters - output > 0.1"
CHECKSUM = "error: The CRC-32 value of NPU differs from that of the bench."
NO_CHECKSUM = "warning: The parameter of NPU does not match the bench."


@dataclass
class Facts:
    """What differs beside numbers, bool (rows,) each: ``requires_grad``, numbers that are arguments, dtypes, shapes."""

    requires_grad: Bools
    scalar: Bools
    dtype: Bools
    shape: Bools


@dataclass
class Verdicts:
    """Attributes:
    levels: int8 (n,), `PASS`, `WARNING` or `ERROR` of each row.
    reasons: row -> what is wrong with it, in the order of the checks; of rows that pass nothing.
    """

    levels: npt.NDArray[np.int8]
    reasons: dict[int, list[str]] = field(default_factory=dict)


class Checks:
    """Runs the checks over the rows of whole records.

    Args:
        starts: int64 (m,), the first row of each record.
        outputs: bool (n,), rows that are results.
        apis: what each record calls; "" where it has no inputs.

    Attributes:
        against_inputs: bool (m,), records whose results are set against their inputs.
        looked_at: bool (n,), the other rows no check looks at.
    """

    def __init__(self, starts: Integers, outputs: Bools, apis: Sequence[str]) -> None:
        self.starts, self.outputs = starts, outputs
        self.group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(outputs))))
        left_out, inputs_left_out = (np.fromiter((api in some for api in apis), bool, len(apis)) for some in (_LEFT_OUT, _INPUTS_LEFT_OUT))
        self.against_inputs = ~left_out & ~inputs_left_out
        self.looked_at = ~left_out[self.group] & (outputs | ~inputs_left_out[self.group])
        self.found = Verdicts(np.zeros(len(outputs), np.int8))

    def statistics(self, not_finite: Bools, norm: Floats, shown: Floats, facts: Facts) -> Verdicts:
        """By statistics.

        Args:
            not_finite: bool (n,), the target has NaN or Inf and the golden side not.
            norm: float64 (n,), relative error of the norm as a fraction, NaN without one; `shown`: as the file shows it.
            facts: what differs beside numbers.
        """
        self._flag(not_finite & self.looked_at, ERROR, NOT_FINITE)
        known = np.nan_to_num(norm, nan=0.0, posinf=np.inf)
        inside, outside = self._largest(np.where(self.outputs, 0.0, known)), self._largest(np.where(self.outputs, known, 0.0))
        off = self.outputs & (self.against_inputs & (inside < _SMALL))[self.group] & (np.abs(shown) > _LARGE)
        self._flag(off, ERROR, RELATIVE)
        self._facts(facts)
        with np.errstate(all="ignore"):
            grown = np.where(inside == 0, outside > _NEW, outside / inside > _TIMES)
        self._first_output(self.against_inputs & grown, WARNING, TEN_TIMES)
        return self.found

    def tensors(self, not_finite: Bools, thousandth: Sequence[Any], cosine: Sequence[Any], facts: Facts) -> Verdicts:
        """By saved tensors: the cells of both metrics, one per row; the rest as in `statistics`."""
        self._flag(not_finite & self.looked_at, ERROR, NOT_FINITE)
        inside, outside = self._smallest(thousandth)
        self._first_output(self.against_inputs & (inside > _ALIKE) & (outside < _APART), ERROR, THOUSANDTH)
        self._facts(facts)
        inside, outside = self._smallest(cosine)
        self._first_output(self.against_inputs & (inside > _ALIKE) & (inside - outside > _APART), WARNING, COSINE)
        return self.found

    def checksums(self, off: Bools, alone: Bools) -> Verdicts:
        """By checksums: bool (n,), where they are not the same, and where one side has none."""
        self._flag(off & ~alone & self.looked_at, ERROR, CHECKSUM)
        self._flag(off & alone & self.looked_at, WARNING, NO_CHECKSUM)
        return self.found

    def _facts(self, facts: Facts) -> None:
        self._flag(facts.requires_grad & self.looked_at, ERROR, REQUIRES_GRAD)
        self._flag(facts.scalar & ~self.outputs & self.against_inputs[self.group], ERROR, SCALAR)
        self._flag(facts.dtype & self.looked_at, ERROR, DTYPE)
        self._flag(facts.shape & self.looked_at, ERROR, SHAPE)

    def _largest(self, values: Floats) -> Floats:
        return np.asarray(np.maximum(np.maximum.reduceat(values, self.starts), 0.0)) if len(values) else values

    def _smallest(self, cells: Sequence[Any]) -> tuple[Floats, Floats]:
        """The smallest number among the inputs and among the results of each record; 1 where there is none."""
        values = np.fromiter(
            (float(cell) if isinstance(cell, (int, float)) and cell == cell else 1.0 for cell in cells), np.float64, len(cells)
        )
        if not len(values):
            return values, values
        inside, outside = (
            np.minimum.reduceat(np.minimum(np.where(among, values, 1.0), 1.0), self.starts) for among in (~self.outputs, self.outputs)
        )
        return inside, outside

    def _first_output(self, records: Bools, level: int, reason: str) -> None:
        before = np.cumsum(self.outputs)
        earlier = np.concatenate(([0], before))[self.starts][self.group] if len(self.outputs) else before
        self._flag(self.outputs & (before - earlier == 1) & records[self.group], level, reason)

    def _flag(self, off: Bools, level: int, reason: str) -> None:
        self.found.levels[off] = np.maximum(self.found.levels[off], level)
        for row in np.flatnonzero(off).tolist():
            self.found.reasons.setdefault(row, []).append(reason)


@dataclass
class Table:
    """Cells that the checks look at; one item per row, whole records only.

    Attributes:
        op: int64, record of each row.
        names, golden_names, dtypes, golden_dtypes, shapes, golden_shapes: as shown.
        grads, golden_grads: True, False or ``N/A``.
        maxima, golden_maxima: cells of the maximum; of an argument its value.
        bad, golden_bad: Max or Min is NaN or infinite.
        norm: relative error of the norm as a fraction, NaN where there is none (statistics).
        norm_cells: cells of it.
        thousandth, cosine: cells of these metrics (tensors).
        checksums: cells of both sides.
    """

    op: npt.NDArray[np.int64]
    names: list[str]
    golden_names: list[str]
    dtypes: list[str] = field(default_factory=list)
    golden_dtypes: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    golden_shapes: list[str] = field(default_factory=list)
    grads: list[Any] = field(default_factory=list)
    golden_grads: list[Any] = field(default_factory=list)
    maxima: list[Any] = field(default_factory=list)
    golden_maxima: list[Any] = field(default_factory=list)
    bad: Bools | None = None
    golden_bad: Bools | None = None
    norm: Floats | None = None
    norm_cells: list[Any] = field(default_factory=list)
    thousandth: Sequence[Any] | None = None
    cosine: Sequence[Any] | None = None
    checksums: tuple[list[Any], list[Any]] | None = None


def table_verdicts(table: Table) -> tuple[list[str], list[str]]:
    """(results, reasons as a JSON list) of a table: of statistics, tensors or checksums, by what it has."""
    n = len(table.names)
    outputs = np.fromiter((".output." in name for name in table.names), bool, n)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(table.op)) + 1)) if n else np.zeros(0, np.int64)
    checks = Checks(starts, outputs, list(_apis(table.names, starts, outputs)))
    if table.checksums is not None:
        nothing = (UNMATCHED, "Nan", "")
        pairs = list(zip(*table.checksums))
        off = np.fromiter((target != golden for target, golden in pairs), bool, n)
        verdicts = checks.checksums(off, np.fromiter((target in nothing or golden in nothing for target, golden in pairs), bool, n))
    else:
        assert table.bad is not None
        assert table.golden_bad is not None
        not_finite, facts = table.bad & ~table.golden_bad, _facts(table)
        if table.norm is not None:
            shown = np.fromiter((_fraction(cell) for cell in table.norm_cells), np.float64, n)
            verdicts = checks.statistics(not_finite, table.norm, shown, facts)
        else:
            assert table.thousandth is not None
            assert table.cosine is not None
            verdicts = checks.tensors(not_finite, table.thousandth, table.cosine, facts)
    texts = ["[]"] * n
    for row, reasons in verdicts.reasons.items():
        texts[row] = json.dumps(reasons)
    return [WORDS[level] for level in verdicts.levels.tolist()], texts


def _apis(names: Sequence[str], starts: Integers, outputs: Bools) -> Iterator[str]:
    for start, end in itertools.pairwise([*starts.tolist(), len(names)]):
        first_input = next((row for row in range(start, end) if not outputs[row]), None)
        parts = [] if first_input is None else names[first_input].split(".", 2)
        yield parts[1] if len(parts) > 1 else ""


def _facts(table: Table) -> Facts:
    matched = np.fromiter((name != UNMATCHED for name in table.golden_names), bool, len(table.names))

    def differ(target: Sequence[Any], golden: Sequence[Any]) -> Bools:
        return np.asarray(
            np.fromiter((target_cell != golden_cell for target_cell, golden_cell in zip(target, golden)), bool, len(table.names)) & matched
        )

    dtypes = zip(table.shapes, table.dtypes, table.golden_dtypes)
    scalars = np.fromiter(
        (shape == "[]" and "class" in target_cell and "class" in golden_cell for shape, target_cell, golden_cell in dtypes),
        bool,
        len(table.names),
    )
    whole = np.fromiter(("qkv" not in name and "gate_up" not in name for name in table.golden_names), bool, len(table.names))
    return Facts(
        differ(table.grads, table.golden_grads),
        scalars & differ(table.maxima, table.golden_maxima),
        whole & differ(table.dtypes, table.golden_dtypes),
        differ(table.shapes, table.golden_shapes),
    )


def _fraction(cell: Any) -> float:
    try:
        return float(cell.strip("%")) / 100
    except (ValueError, AttributeError):
        return 0.0
