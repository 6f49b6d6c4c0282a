"""What the rows of a node and of its partner differ by, in the columns of the existing tool: made for a node when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from msprobe_engine.find.verdicts.version_262 import WORDS, Verdicts
from msprobe_engine.find.verdicts.version_811 import DIFFERENT
from msprobe_engine.find.verdicts.version_811 import PASS as SAME
from msprobe_engine.measure.columns import DIFFERENCES, GRAD_EQUAL, MESSAGE, RELATIVE, RESULT, UNMATCHED
from msprobe_engine.measure.factorize import Bools
from msprobe_engine.report.graph.nodes.model import Cell
from msprobe_engine.report.graph.nodes.rows import Floats, PairedRows

NAN = "Nan"
_GROUP = "torch.ProcessGroup"
_NO_STATISTICS: Mapping[str, Cell] = dict.fromkeys((*DIFFERENCES, *RELATIVE), " ")
Cells = Mapping[str, Mapping[str, Cell]]


class RowMetrics:
    """Node of the target -> row name -> column -> value.

    Args:
        rows: beside those of the golden side.
        old: the columns of 8.1.1; else those of 26.2.0, which have a verdict per row.
        verdicts: of 26.2.0.
        difference: float64 (n, 4), by statistics (`precision.relative_errors`).
        equal: bool (n,), by checksums.
        cells: column -> (n,), by saved tensors.
    """

    def __init__(
        self,
        rows: PairedRows,
        old: bool,
        verdicts: Verdicts | None,
        difference: Floats | None = None,
        equal: Bools | None = None,
        cells: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self._rows, self._old, self._verdicts = rows, old, verdicts
        self._difference, self._equal, self._cells = difference, equal, cells

    @cached_property
    def _place(self) -> dict[int, tuple[int, int]]:
        """Node -> positions of its first row and behind its last."""
        starts = self._rows.starts.tolist()
        return dict(zip(self._rows.nodes.tolist(), zip(starts, [*starts[1:], len(self._rows)])))

    @cached_property
    def _columns(self) -> tuple[list[int], list[int], list[int], list[list[float]]]:
        """Rows of both sides, levels, differences; lists are read one by one many times faster than arrays."""
        levels = [] if self._verdicts is None else self._verdicts.levels.tolist()
        return (
            self._rows.target_rows.tolist(),
            self._rows.golden_rows.tolist(),
            levels,
            [] if self._difference is None else self._difference.tolist(),
        )

    def __call__(self, node: int) -> Cells:
        """Of one node; nothing for a node without a partner."""
        span = self._place.get(node)
        if span is None:
            return {}
        names, target_rows = self._rows.target.name, self._columns[0]
        return {names[target_rows[position]]: self._row(position) for position in range(*span)}

    def _row(self, position: int) -> dict[str, Cell]:
        cells: dict[str, Cell] = {}
        target_rows, golden_rows, levels, differences = self._columns
        i, j = target_rows[position], golden_rows[position]
        target, golden = self._rows.target, self._rows.golden
        if (i in target.nonfloat_stats and target.nonfloat_stats[i][0] is None) or target.dtype[
            i
        ] == _GROUP:  # shown as nothing, or as ranks and no more
            return cells
        if self._equal is not None:
            if self._old:
                return {RESULT: NAN if j < 0 else SAME if self._equal[position] else DIFFERENT}
        elif self._cells is not None:
            cells.update((column, values[position]) for column, values in self._cells.items())
        elif differences:
            self._statistics(cells, differences[position], i, j)
        if self._verdicts is not None:
            reasons = self._verdicts.reasons.get(position)
            cells[GRAD_EQUAL] = "True" if j >= 0 and target.requires_grad[i] == golden.requires_grad[j] else "False"
            cells[RESULT] = WORDS[levels[position]]
            cells[MESSAGE] = json.dumps(reasons) if reasons else "[]"
        return cells

    def _statistics(self, cells: dict[str, Cell], differences: Sequence[float], i: int, j: int) -> None:
        if j < 0:
            cells.update(_NO_STATISTICS)
            return
        target, golden = self._rows.target, self._rows.golden
        golden_stats = golden.stats_of(j)
        if i in target.nonfloat_stats or j in golden.nonfloat_stats:
            pairs = [_pair(target_value, golden_value) for target_value, golden_value in zip(target.stats_of(i), golden_stats)]
            if self._old and type(target.values.get(i)) is int and type(golden.values.get(j)) is int:  # a rank, which 26.2.0 takes for text
                pairs = [_pair(target.values[i], golden.values[j])] * 4
        else:
            pairs = [_cells(difference, golden_value) for difference, golden_value in zip(differences, golden_stats)]
        cells.update(zip(DIFFERENCES, (difference for difference, _ in pairs)))
        cells.update(zip(RELATIVE, (relative for _, relative in pairs)))


def _pair(target: object, golden: object) -> tuple[Cell, str]:
    """(difference, relative error) of two values of the dump."""
    if (
        isinstance(target, (int, float))
        and isinstance(golden, (int, float))
        and not isinstance(target, bool)
        and not isinstance(golden, bool)
    ):
        try:
            return _cells(target - golden, golden)
        except OverflowError:  # an integer beyond float64
            return NAN, NAN
    return UNMATCHED, UNMATCHED


def _cells(difference: float, golden: Any) -> tuple[Cell, str]:
    if difference != difference:
        return NAN, NAN
    if difference - difference != 0:
        relative = abs(difference / golden * 100) if golden else 0.0
        return f"{difference}\t", f"{relative}%" if golden else UNMATCHED
    try:
        return difference, f"{abs(difference / golden * 100)}%" if golden else UNMATCHED
    except OverflowError:
        return difference, "inf%"
