"""pass, warning and error as 26.2.0 gives them, row by row within each record; the reasons as a JSON list.

The checks, their limits and which calls are left out are facts of that version (`docs/compatibility.md` has what is wrong with them); the
words of the reasons are part of its format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.measure.columns import UNMATCHED

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

PASS, WARNING, ERROR = "pass", "warning", "error"
_LEVELS = (PASS, WARNING, ERROR)

_LEFT_OUT = frozenset(
    ("empty", "empty_like", "numpy", "to", "__setitem__", "empty_with_format", "new_empty_strided", "new_empty", "empty_strided")
)
_INPUTS_LEFT_OUT = frozenset(("_reduce_scatter_base", "_all_gather_base", "all_to_all_single", "batch_isend_irecv"))

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


class Checks:
    """Runs the checks over the rows of whole records."""

    def __init__(self, table: Table) -> None:
        self.t = table
        n = len(table.names)
        self.output = np.fromiter((".output." in name for name in table.names), bool, n)
        changes = np.flatnonzero(np.diff(table.op)) + 1
        self.starts = np.concatenate(([0], changes)) if n else np.zeros(0, np.int64)
        self.group = np.zeros(n, np.int64)
        self.group[changes] = 1
        self.group = np.cumsum(self.group)
        self.matched = np.fromiter((name != UNMATCHED for name in table.golden_names), bool, n)
        self._ignore()
        self.level = np.zeros(n, np.int8)
        self.reasons: dict[int, list[str]] = {}

    def _ignore(self) -> None:
        """`every`: rows no check looks at; `pairs`: records whose results are set against their inputs."""
        n = len(self.t.names)
        self.every = np.zeros(n, bool)
        self.pairs = np.ones(len(self.starts), bool)
        ends = np.append(self.starts[1:], n)
        for at, (start, end) in enumerate(zip(self.starts.tolist(), ends.tolist())):
            first = next((row for row in range(start, end) if not self.output[row]), None)
            if first is None:
                continue
            parts = self.t.names[first].split(".", 2)
            api = parts[1] if len(parts) > 1 else ""
            if api in _LEFT_OUT:
                self.every[start:end] = True
                self.pairs[at] = False
            elif api in _INPUTS_LEFT_OUT:
                self.every[start:end] = ~self.output[start:end]
                self.pairs[at] = False

    def statistics(self) -> tuple[list[str], list[str]]:
        """(results, reasons) of a table of statistics."""
        t = self.t
        assert t.norm is not None
        self._finite()
        inside, outside = self._largest(t.norm, ~self.output), self._largest(t.norm, self.output)
        shown = np.fromiter((_fraction(cell) for cell in t.norm_cells), np.float64, len(t.names))
        allowed = (inside < 0.1) & self.pairs
        self._flag(self.output & allowed[self.group] & (np.abs(shown) > 0.5), 2, RELATIVE)
        self._facts()
        with np.errstate(all="ignore"):
            grown = np.where(inside == 0, outside > 0.1, outside / inside > 10) & self.pairs
        self._first_output(grown, 1, TEN_TIMES)
        return self._done()

    def tensors(self) -> tuple[list[str], list[str]]:
        """(results, reasons) of a table of tensors."""
        t = self.t
        assert t.thousandth is not None
        assert t.cosine is not None
        self._finite()
        inside, outside = self._smallest(t.thousandth, ~self.output), self._smallest(t.thousandth, self.output)
        self._first_output((inside > 0.9) & (outside < 0.1) & self.pairs, 2, THOUSANDTH)
        self._facts()
        inside, outside = self._smallest(t.cosine, ~self.output), self._smallest(t.cosine, self.output)
        self._first_output((inside > 0.9) & (inside - outside > 0.1) & self.pairs, 1, COSINE)
        return self._done()

    def checksums(self) -> tuple[list[str], list[str]]:
        """(results, reasons) of a table of checksums."""
        assert self.t.checksums is not None
        nothing = (UNMATCHED, "Nan", "")
        for at, (a, b) in enumerate(zip(*self.t.checksums)):
            if a != b and not self.every[at]:
                missing = a in nothing or b in nothing
                self._set(at, 1 if missing else 2, NO_CHECKSUM if missing else CHECKSUM)
        return self._done()

    def _finite(self) -> None:
        assert self.t.bad is not None
        assert self.t.golden_bad is not None
        self._flag(self.t.bad & ~self.t.golden_bad & ~self.every, 2, NOT_FINITE)

    def _facts(self) -> None:
        t = self.t
        look = self.matched & ~self.every
        ask = look & ~self.output & self.pairs[self.group] if len(self.group) else look
        for at in np.flatnonzero(look).tolist():
            if t.grads[at] != t.golden_grads[at]:
                self._set(at, 2, REQUIRES_GRAD)
            scalar = ask[at] and t.shapes[at] == "[]" and "class" in t.dtypes[at] and "class" in t.golden_dtypes[at]
            if scalar and t.maxima[at] != t.golden_maxima[at]:
                self._set(at, 2, SCALAR)
            if t.dtypes[at] != t.golden_dtypes[at] and "qkv" not in t.golden_names[at] and "gate_up" not in t.golden_names[at]:
                self._set(at, 2, DTYPE)
            if t.shapes[at] != t.golden_shapes[at]:
                self._set(at, 2, SHAPE)

    def _largest(self, values: Floats, among: Bools) -> Floats:
        chosen = np.where(among, np.nan_to_num(values, nan=0.0, posinf=np.inf), 0.0)
        return np.maximum(np.maximum.reduceat(chosen, self.starts), 0.0) if len(chosen) else chosen

    def _smallest(self, cells: Sequence[Any], among: Bools) -> Floats:
        values = np.fromiter((cell if type(cell) in (int, float) and cell == cell else 1.0 for cell in cells), np.float64, len(cells))
        chosen = np.where(among, values, 1.0)
        return np.minimum(np.minimum.reduceat(chosen, self.starts), 1.0) if len(chosen) else chosen

    def _first_output(self, groups: Bools, level: int, reason: str) -> None:
        ends = np.append(self.starts[1:], len(self.output))
        for at in np.flatnonzero(groups).tolist():
            rows = np.flatnonzero(self.output[self.starts[at] : ends[at]])
            if len(rows):
                self._set(int(self.starts[at] + rows[0]), level, reason)

    def _flag(self, rows: Bools, level: int, reason: str) -> None:
        for at in np.flatnonzero(rows).tolist():
            self._set(at, level, reason)

    def _set(self, at: int, level: int, reason: str) -> None:
        self.level[at] = max(int(self.level[at]), level)
        self.reasons.setdefault(at, []).append(reason)

    def _done(self) -> tuple[list[str], list[str]]:
        texts = ["[]"] * len(self.level)
        for at, reasons in self.reasons.items():
            texts[at] = json.dumps(reasons)
        return [_LEVELS[level] for level in self.level.tolist()], texts


def _fraction(cell: Any) -> float:
    try:
        return float(cell.strip("%")) / 100
    except (ValueError, AttributeError):
        return 0.0
