"""Compares saved tensors of matched rows: the metrics columns of the tables, and a distance against round-off for the verdicts.

Pairs are worked on by threads, which numpy lets run side by side; a pair takes a few hundred kilobytes whatever its size. Views with
gaps, user's metrics and products with matrices need both tensors whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.log import get_logger, one_line
from msprobe_engine.core.process.cores import usable_cores
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.tensors.blocks import InMemoryTensor, Readable, check_dumped, join, open_elements, whole
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_engine.measure import roundoff
from msprobe_engine.measure.columns import MESSAGE, METRICS
from msprobe_engine.measure.options import NEW, OLD, CompareOptions
from msprobe_engine.measure.tensors import metric_cells, user_metrics
from msprobe_engine.measure.tensors.metric_cells import Cell
from msprobe_engine.measure.tensors.metrics import Figures, TensorDiff
from msprobe_engine.measure.tensors.postprocess import Postprocess
from msprobe_engine.measure.tensors.user_metrics import Metric, load_metrics

_log = get_logger()
JOINED = ";"
"""Between the names of several tensors that are compared as one (training against inference)."""


class Pair(NamedTuple):
    """What is compared: ``data_name`` of both sides, "" for none; `matched`: the row has a partner; `argument`: it is no tensor; `said`:
    shape and dtype in the dump of each side, empty where files are not held against it."""

    target: str
    golden: str
    matched: bool = True
    argument: bool = False
    said: tuple[tuple[Any, str | None], ...] = ()


class Measured(NamedTuple):
    """Of one pair.

    Attributes:
        cells: the six metrics.
        extra: cells of further metrics.
        message: what is to be said.
        distance: see `Figures.distance`; NaN when nothing was compared.
        limit: distance that round-off explains.
        damaged: a file could not be read.
        figures: what was measured, by our rule; None when nothing was.
    """

    cells: Sequence[Cell]
    extra: Sequence[Cell]
    message: str
    distance: float = math.nan
    limit: float = math.nan
    damaged: bool = False
    figures: Figures | None = None


@dataclass
class TensorRows:
    """Of many pairs.

    Attributes:
        columns: `METRICS`, further metrics and `MESSAGE`, one list of cells each.
        distance, limit: float64 [pairs], see `Measured`.
        damaged: [pairs], the file could not be read.
        figures: pair -> what was measured of it, by our rule.
    """

    columns: dict[str, list[Cell]] = field(default_factory=dict)
    distance: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    limit: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    damaged: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, bool))
    figures: dict[tuple[int, int], Figures] = field(default_factory=dict)


class TensorMode:
    """Compares pairs of saved tensors of two directories.

    Args:
        target, golden: their saved tensors.
        rule: `OLD` or `NEW`: figures and words exactly as that generation of the existing tool; None: ours.
        metrics: of the user.
        postprocess: products with matrices.
    """

    def __init__(
        self,
        target: TensorFiles,
        golden: TensorFiles,
        rule: str | None = None,
        metrics: Sequence[Metric] = (),
        postprocess: Postprocess | None = None,
    ) -> None:
        self._files = target, golden
        self._rule = rule
        self._metrics = metrics
        self._postprocess = postprocess or Postprocess()

    def run(self, pairs: Iterable[Pair], workers: int = 0) -> Iterator[Measured]:
        """Compare pairs, in their order.

        Args:
            workers: threads; 0 means one per core.
        """
        count = workers or usable_cores()
        if count == 1:
            yield from map(self.measure, pairs)
            return
        with ThreadPoolExecutor(count) as pool:
            yield from pool.map(self.measure, pairs)

    def measure(self, pair: Pair) -> Measured:
        """Compare one pair. A file that cannot be read makes a message, no error."""
        lacking = self._explain_missing_tensor(pair)
        if lacking is not None:
            return self._build_unmeasured(metric_cells.UNSUPPORTED, lacking)
        try:
            with self._open(0, pair.target) as target, self._open(1, pair.golden) as golden:
                for tensor, name, (shape, dtype) in zip((target, golden), pair, () if self._rule else pair.said):
                    check_dumped(tensor, str(name), shape, dtype)
                processed_target, processed_golden, message = self._postprocess_pair(target, golden, pair)
                measured = (
                    self._measure_as_existing_tool(processed_target, processed_golden)
                    if self._rule
                    else self._ours(processed_target, processed_golden)
                )
                extra, said = self._extra(processed_target, processed_golden, measured)
        except (DumpFormatError, UsageError) as error:
            if self._rule:
                text = _pair_text(pair, self._rule == OLD)
                return self._build_unmeasured(metric_cells.UNSUPPORTED, f"Dump file: {text} not found or read failed.", damaged=True)
            return self._build_unmeasured(None, one_line(str(error)), damaged=True)
        text = "; ".join(part for part in (measured.message, message, *said) if part)
        return measured._replace(extra=extra, message=text)

    def _explain_missing_tensor(self, pair: Pair) -> str | None:
        """Why nothing can be compared; None when something can."""
        old = self._rule == OLD
        if self._rule:
            if pair.matched and not pair.target:
                return metric_cells.NO_TARGET_FILE[old]
            if not pair.matched:
                return metric_cells.NO_GOLDEN[old] if pair.target else metric_cells.NO_TARGET_FILE[old]
            return None if pair.golden else metric_cells.NO_GOLDEN_FILE
        if not pair.matched or (pair.argument and not (pair.target and pair.golden)):
            return ""
        missing = [side for side, name in (("target", pair.target), ("golden side", pair.golden)) if not name]
        return f"no saved tensor of the {' and the '.join(missing)}" if missing else None

    def _build_unmeasured(self, word: str | None, message: str, damaged: bool = False) -> Measured:
        cells: list[Cell] = [word if self._rule else None] * 6
        return Measured(cells, [word if self._rule else None] * len(self._metrics), message, damaged=damaged)

    def _open(self, side: int, name: str) -> Readable:
        if JOINED not in name:
            return open_elements(self._files[side], name)
        names = name.split(JOINED)
        if ".input." in name:
            return open_elements(self._files[side], names[0])
        return join([open_elements(self._files[side], part) for part in names], 0 if ".parameters." in name else 1)

    def _postprocess_pair(self, target: Readable, golden: Readable, pair: Pair) -> tuple[Readable, Readable, str]:
        if not self._postprocess or not self._postprocess.applies_to(pair.target, pair.golden):
            return target, golden, ""
        arrays = whole(target), whole(golden)
        if self._rule == NEW:
            arrays = np.squeeze(arrays[0]), np.squeeze(arrays[1])
        processed_target, processed_golden, message = self._postprocess.apply(*arrays, (pair.target, pair.golden))
        return (
            InMemoryTensor(processed_target, processed_target.dtype.name),
            InMemoryTensor(processed_golden, processed_golden.dtype.name),
            message,
        )

    def _measure_as_existing_tool(self, target: Readable, golden: Readable) -> Measured:
        old = self._rule == OLD
        shapes = tuple(side.shape if old else tuple(n for n in side.shape if n != 1) for side in (target, golden))
        differ = _same_type(target.dtype) != _same_type(golden.dtype)
        if not target.size:
            return Measured(metric_cells.same(metric_cells.UNSUPPORTED), (), metric_cells.EMPTY)
        if shapes[0] != shapes[1]:
            return Measured(metric_cells.same(metric_cells.SHAPE_UNMATCHED), (), metric_cells.SHAPES)
        if not shapes[0]:
            target_scalar, golden_scalar = (whole(side).reshape(()) for side in (target, golden))
            cells, message = metric_cells.existing_scalar(target_scalar, golden_scalar, old)
            return Measured(cells, (), message)
        figures = TensorDiff(target, golden, self._rule).run()
        if figures.apart:
            return Measured(metric_cells.same(metric_cells.NOT_AVAILABLE), (), metric_cells.POSITIONS)
        cells, message = metric_cells.existing_cells(figures, differ)
        return Measured(cells, (), message, figures.distance)

    def _ours(self, target: Readable, golden: Readable) -> Measured:
        shapes = _shapes(target, golden)
        if target.size != golden.size:
            return Measured([None] * 6, (), shapes, math.inf, 0.0)
        figures = TensorDiff(target, golden, None).run()
        coarse = max((target.dtype, golden.dtype), key=lambda dtype: roundoff.EPS.get(dtype, 0.0))
        allowed = roundoff.call_limit(roundoff.EPS.get(coarse, 0.0), roundoff.longest_sum(list(golden.shape)))
        said = [shapes, "" if target.dtype == golden.dtype else f"{target.dtype} against {golden.dtype}"]
        if not figures.size:
            said.append("both are empty")
        said.append(metric_cells.sentence(figures, golden.shape, coarse, allowed))
        # another shape is a fact, whatever the numbers say
        distance = figures.distance if _without_ones(target) == _without_ones(golden) else math.nan
        return Measured(metric_cells.cells(figures), (), "; ".join(part for part in said if part), distance, allowed, figures=figures)

    def _extra(self, target: Readable, golden: Readable, measured: Measured) -> tuple[list[Cell], list[str]]:
        if not self._metrics:
            return [], []
        if measured.cells[0] is None or measured.cells[0] in (metric_cells.SHAPE_UNMATCHED, metric_cells.NOT_AVAILABLE):
            return [measured.cells[0]] * len(self._metrics), []
        arrays = whole(target), whole(golden)
        if self._rule == NEW:
            arrays = np.squeeze(arrays[0]), np.squeeze(arrays[1])
        results = [user_metrics.apply(metric, *arrays) for metric in self._metrics]
        return [cell for cell, _ in results], [message for _, message in results]


def plugin_names(options: CompareOptions) -> tuple[str, ...]:
    """Columns of the metrics that the user named.

    Raises:
        UsageError: one cannot be loaded.
    """
    return tuple(metric.column for metric in _load_metrics_once(options.metrics))


def metrics(
    target: DumpTable,
    golden: DumpTable,
    pairs: Sequence[tuple[int, int]],
    options: CompareOptions,
    tell: Callable[[int], None] = lambda _: None,
) -> TensorRows:
    """Compare the tensors of rows.

    Args:
        pairs: (row of the target, row of the golden side); -1 where there is none.
        tell: called with the number of pairs done, for a progress bar.

    Raises:
        UsageError: a metric or the file of matrices of `options` cannot be used.
    """
    loaded = _load_metrics_once(options.metrics)
    rule = options.columns if options.compat else None
    mode = TensorMode(target.files, golden.files, rule, loaded, Postprocess(options.postprocess))
    named = [_pair(target, golden, i, j) for i, j in pairs]
    results: list[Measured] = []
    for position, measured in enumerate(mode.run(named, options.workers)):
        results.append(measured)
        tell(position + 1)
        if options.tensor_log:
            target_row, golden_row = pairs[position]
            name = target.name[target_row] if target_row >= 0 else golden.name[golden_row]
            shown = ", ".join(f"{column} {cell}" for column, cell in zip(METRICS, measured.cells))
            _log.info("[%s] Compare result: %s %s", one_line(name), shown, one_line(measured.message))
    distance = np.array([result.distance for result in results], np.float64)
    for position, (i, j) in enumerate(pairs):
        if i >= 0 and j >= 0 and target.shape[i] != golden.shape[j]:
            distance[position] = math.nan
    columns: dict[str, list[Cell]] = {name: [result.cells[position] for result in results] for position, name in enumerate(METRICS)}
    for position, metric in enumerate(loaded):
        columns[metric.column] = [result.extra[position] for result in results]
    columns[MESSAGE] = [result.message for result in results]
    return TensorRows(
        columns,
        distance,
        np.array([result.limit for result in results], np.float64),
        np.array([result.damaged for result in results], bool),
        {pair: result.figures for pair, result in zip(pairs, results) if result.figures is not None},
    )


@lru_cache(maxsize=4)
def _load_metrics_once(paths: tuple[Path, ...]) -> tuple[Metric, ...]:
    return load_metrics(paths)


def _pair(target: DumpTable, golden: DumpTable, i: int, j: int) -> Pair:
    names = [side.data_name[row] if row >= 0 else "" for side, row in ((target, i), (golden, j))]
    argument = any(row >= 0 and (row in side.values or side.dtype[row] is None) for side, row in ((target, i), (golden, j)))
    both = i >= 0 and j >= 0
    said = ((target.shape[i], target.dtype[i]), (golden.shape[j], golden.dtype[j])) if both and not argument else ()
    return Pair(names[0], names[1], both, argument, said)


def _pair_text(pair: Pair, old: bool) -> str:
    return str([pair.target, pair.golden]) if old else f"{pair.target} or {pair.golden}"


def _same_type(dtype: str) -> str:
    """bfloat16 and float8 are float32 once the existing tool has read them."""
    return "float32" if dtype == "bfloat16" or dtype.startswith("float8") else dtype


def _shapes(target: Readable, golden: Readable) -> str:
    if target.shape == golden.shape:
        return ""
    text = f"shape {list(target.shape)} against {list(golden.shape)}"
    return f"{text}; compared element by element in C order" if target.size == golden.size else text


def _without_ones(tensor: Readable) -> list[int]:
    return [n for n in tensor.shape if n != 1]
