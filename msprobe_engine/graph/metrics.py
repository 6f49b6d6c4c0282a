"""What the rows of a node and of its partner differ by, in the columns of the existing tool: made for a node when it is asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from msprobe_engine.compare.codes import Bools
from msprobe_engine.compare.columns import DIFFERENCES, GRAD_EQUAL, MESSAGE, METRICS, RELATIVE, RESULT, UNMATCHED
from msprobe_engine.compare.verdict_811 import DIFFERENT
from msprobe_engine.compare.verdict_811 import PASS as SAME
from msprobe_engine.graph.model import Cell
from msprobe_engine.graph.rows import Floats, PairedRows
from msprobe_engine.graph.verdicts import WORDS, Verdicts

NAN, NOTHING = "Nan", None
Cells = Mapping[str, Mapping[str, Cell]]


class RowMetrics:
    """Node of the target -> row name -> column -> value.

    Args:
        rows: beside those of the golden side.
        old: the columns of 8.1.1; else those of 26.2.0, which have a verdict per row.
        verdicts: of 26.2.0.
        difference, relative: float64 (n, 4), by statistics (`precision.relative_errors`).
        equal: bool (n,), by checksums.
        cells: column -> (n,), by saved tensors.
    """

    def __init__(
        self,
        rows: PairedRows,
        old: bool,
        verdicts: Verdicts | None,
        difference: Floats | None = None,
        relative: Floats | None = None,
        equal: Bools | None = None,
        cells: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self._rows, self._old, self._verdicts = rows, old, verdicts
        self._difference, self._relative, self._equal, self._cells = difference, relative, equal, cells

    @cached_property
    def _place(self) -> dict[int, int]:
        return {node: at for at, node in enumerate(self._rows.nodes.tolist())}

    def __call__(self, node: int) -> Cells:
        """Of one node; nothing for a node without a partner."""
        at = self._place.get(node)
        if at is None:
            return {}
        starts, names = self._rows.starts, self._rows.target.name
        end = int(starts[at + 1]) if at + 1 < len(starts) else len(self._rows)
        return {names[self._rows.left[row]]: self._row(row) for row in range(int(starts[at]), end)}

    def _row(self, at: int) -> dict[str, Cell]:
        found: dict[str, Cell] = {}
        i, j = int(self._rows.left[at]), int(self._rows.right[at])
        side = self._rows.target
        if i in side.odd and side.odd[i][0] is None:  # shown as nothing
            return found
        if self._equal is not None:
            if self._old:
                return {RESULT: NAN if j < 0 else SAME if self._equal[at] else DIFFERENT}
        elif self._cells is not None:
            found.update((column, self._cells[column][at]) for column in (*METRICS, *(set(self._cells) - set(METRICS))))
        elif self._difference is not None:
            self._statistics(found, at, i, j)
        if not self._old and self._verdicts is not None:
            grads = side.requires_grad[i], self._rows.golden.requires_grad[j] if j >= 0 else None
            found[GRAD_EQUAL] = str(j >= 0 and grads[0] == grads[1])
            found[RESULT] = WORDS[int(self._verdicts.levels[at])]
            found[MESSAGE] = json.dumps(self._verdicts.reasons(at))
        return found

    def _statistics(self, found: dict[str, Cell], at: int, i: int, j: int) -> None:
        if j < 0:
            found.update(dict.fromkeys((*DIFFERENCES, *RELATIVE), NOTHING))
            return
        first, second = self._rows.target, self._rows.golden
        if i in first.odd or j in second.odd:
            pairs = [_pair(x, y) for x, y in zip(first.four(i), second.four(j))]
        else:
            assert self._difference is not None
            pairs = [_cells(x, y) for x, y in zip(self._difference[at].tolist(), second.four(j))]
        found.update(zip((*DIFFERENCES, *RELATIVE), (*(x for x, _ in pairs), *(y for _, y in pairs))))


def _pair(x: object, y: object) -> tuple[Cell, str]:
    """(difference, relative error) of two values of the dump."""
    if isinstance(x, (int, float)) and isinstance(y, (int, float)) and not isinstance(x, bool) and not isinstance(y, bool):
        try:
            return _cells(x - y, y)
        except OverflowError:  # an integer beyond float64
            return NAN, NAN
    return UNMATCHED, UNMATCHED


def _cells(difference: float, golden: Any) -> tuple[Cell, str]:
    if math.isnan(difference):
        return NAN, NAN
    relative = f"{np.abs(np.float64(difference) / np.float64(golden) * 100)}%" if golden != 0 else UNMATCHED
    return (f"{difference}\t" if math.isinf(difference) else difference), relative
