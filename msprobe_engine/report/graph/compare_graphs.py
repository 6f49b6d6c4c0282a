"""Two graphs of one rank and step, compared: matched, in the numbers of both versions of the existing tool, and in units of round-off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from msprobe_engine.align.calls.alignment import align_sides, are_of_different_frameworks
from msprobe_engine.align.calls.structure import Aligned
from msprobe_engine.align.mapping.user_mapping import Mappings
from msprobe_engine.core.errors import UsageError
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.verdicts.version_262 import Verdicts
from msprobe_engine.formats.dump.dump_table import DIGEST, MD5, STRUCTURE, TENSOR, DumpTable
from msprobe_engine.measure.columns import COSINE, METRICS, ONE_THOUSANDTH
from msprobe_engine.measure.factorize import Bools
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.measure.tensors.mode import metrics as tensor_metrics
from msprobe_engine.report.graph import suspects
from msprobe_engine.report.graph.existing import precision
from msprobe_engine.report.graph.existing.metrics import RowMetrics
from msprobe_engine.report.graph.existing.verdicts import GraphChecks
from msprobe_engine.report.graph.nodes import micro_steps
from msprobe_engine.report.graph.nodes.match import match, match_told, needless
from msprobe_engine.report.graph.nodes.model import Comparison, Graph, TaskOfGraph
from msprobe_engine.report.graph.nodes.rows import Numbers, PairedRows, numbers_of, pair_rows, told_rows
from msprobe_engine.report.graph.options import NEW, OLD, GraphOptions


def compare(target: Graph, golden: Graph, options: GraphOptions, divergence: Divergence | None = None) -> Comparison:
    """Compare two graphs.

    Args:
        target, golden: with sides.
        options: of the whole; `generation` says whose rules and columns hold, numbers of both are made.
        divergence: of two sides that were made of runs cut in different ways, which records belong together and where the runs part.

    Raises:
        UsageError: two frameworks are to be matched by name and there is no layer mapping, or the mapping is none.
    """
    target_side, golden_side = target.side, golden.side
    if target_side is None or golden_side is None:
        raise UsageError("graph: a side without a dump cannot be compared")
    if are_of_different_frameworks(target_side, golden_side) and options.match == "exact" and not options.layer_mapping:
        raise UsageError(
            f"graph: {target_side.path} is of {target_side.framework}, {golden_side.path} of {golden_side.framework}: names cannot be "
            "matched; give a layer mapping (-lm), or match by structure"
        )
    if options.layer_mapping:
        Mappings(layer=options.layer_mapping, loose=options.old).apply(target_side, golden_side)

    @lru_cache(1)
    def align_records() -> Aligned:
        return align_sides(target_side, golden_side)

    if divergence is None:
        matched = match(target, golden, options, align_records)
    else:
        matched = match_told(target, golden, (pair for structure in divergence.structures.values() for pair in structure.pairs))
    micro_steps.copy_to_golden(target, golden, matched.partners, options.match == "exact")
    rows = pair_rows(target, golden, matched.partners)
    if divergence is None:
        measured = suspects.measure_graphs(target, golden, matched.partners, align_records())
    else:
        measured = suspects.measured_by(target, golden, matched.partners, divergence)
    meant = are_of_different_frameworks(target_side, golden_side) and options.match != "exact"
    if meant and measured.begun is not None:
        rows = told_rows(target, rows, suspects.rows_in_common(measured.begun.walker))
    numbers = _Numbers(target, rows, task_of(target_side, golden_side), options, meant)
    return Comparison(
        target=target,
        golden=golden,
        task=numbers.task,
        partners=matched.partners,
        golden_partners=matched.golden_partners,
        index=numbers.index_262(),
        units=measured.units,
        index_of_811=numbers.index_811,
        suspect=measured.suspect,
        suspect_text=measured.text,
        metrics=numbers.metrics(),
        by_structure=matched.by_structure,
        needless=needless(target, golden, matched, align_records())
        if divergence is None and are_of_different_frameworks(target_side, golden_side)
        else (set(), set()),
        golden_rows=_golden_rows(rows),
        begun=measured.begun,
    )


def task_of(target: DumpTable, golden: DumpTable) -> TaskOfGraph:
    """What two sides are compared by. Sides that hold different things are compared by the statistics of both."""
    modes = {target.mode, golden.mode}
    if STRUCTURE in modes:
        return "structure"
    if modes == {TENSOR}:
        return "all"
    if modes in ({MD5}, {DIGEST}):
        return "md5"
    return "summary"


def _golden_rows(rows: PairedRows) -> Any:
    found = np.full(len(rows.target), -1, np.int64)
    found[rows.target_rows] = rows.golden_rows
    return found


@dataclass
class _Numbers:
    """What both versions say of rows beside each other, each made when it is first asked for.

    Attributes:
        meant: two frameworks: a dtype is what it means, not its name.
    """

    graph: Graph
    rows: PairedRows
    task: TaskOfGraph
    options: GraphOptions
    meant: bool = False

    @cached_property
    def target_numbers(self) -> Numbers:
        return numbers_of(self.rows.target)

    @cached_property
    def golden_numbers(self) -> Numbers:
        return numbers_of(self.rows.golden)

    @cached_property
    def differences(self) -> tuple[Any, Any]:
        return precision.relative_errors(self.rows, self.target_numbers, self.golden_numbers)

    @cached_property
    def equal(self) -> Bools:
        target_checksums, golden_checksums = _checksums(self.rows.target), _checksums(self.rows.golden)
        pairs = zip(self.rows.target_rows.tolist(), self.rows.golden_rows.tolist())
        return np.fromiter((j >= 0 and target_checksums[i] == golden_checksums[j] for i, j in pairs), bool, len(self.rows))

    @cached_property
    def cells_old(self) -> dict[str, Sequence[Any]]:
        return self._cells(OLD)

    @cached_property
    def cells_new(self) -> dict[str, Sequence[Any]]:
        return self._cells(NEW)

    def _cells(self, generation: str) -> dict[str, Sequence[Any]]:
        asked = CompareOptions(
            columns=generation, compat=True, tensor_log=self.options.tensor_log and generation == self.options.generation
        )
        pairs = list(zip(self.rows.target_rows.tolist(), self.rows.golden_rows.tolist()))
        metrics = tensor_metrics(self.rows.target, self.rows.golden, pairs, asked)
        if metrics.damaged.any():
            first_name = self.rows.target.name[pairs[int(np.argmax(metrics.damaged))][0]]
            self.rows.target.add_problem(
                f"{int(metrics.damaged.sum()):,} rows have a saved tensor that could not be read, the first is {first_name}"
            )
        return {name: metrics.columns[name] for name in METRICS}

    @cached_property
    def verdicts(self) -> Verdicts:
        checks = GraphChecks(self.graph, self.rows, bool(self.options.merge), self.meant)
        if self.task == "md5":
            return checks.checksums(self.equal)
        if self.task == "all":
            return checks.tensors(self.target_numbers, self.golden_numbers, self.cells_new[ONE_THOUSANDTH], self.cells_new[COSINE])
        return checks.statistics(self.target_numbers, self.golden_numbers, self.differences[1][:, 3])

    def index_262(self) -> list[float | None]:
        worst = np.maximum.reduceat(self.verdicts.levels, self.rows.starts) if len(self.rows.nodes) else np.zeros(0, np.int8)
        return precision.index_262(self.graph, self.rows, worst.tolist(), self.task)

    def index_811(self) -> list[float | None]:
        if self.task == "md5":
            numbers = precision.checksums_811(self.rows, self.equal)
        elif self.task == "all":
            numbers = precision.tensors_811(self.rows, self.target_numbers, self.cells_old[ONE_THOUSANDTH])
        else:
            numbers = precision.statistics_811(self.rows, self.target_numbers, self.differences[1])
        return precision.index_811(self.graph, self.rows, numbers, self.task)

    def metrics(self) -> RowMetrics:
        old = self.options.old
        verdicts = None if old else self.verdicts
        if self.task == "md5":
            return RowMetrics(self.rows, old, verdicts, equal=self.equal)
        if self.task == "all":
            return RowMetrics(self.rows, old, verdicts, cells=self.cells_old if old else self.cells_new)
        return RowMetrics(self.rows, old, verdicts, self.differences[0])


def _checksums(side: DumpTable) -> list[str | None]:
    """Checksum or digest of each row; None of a row that is nothing."""
    if side.mode == DIGEST:
        found: list[str | None] = [side.extra.get(row, {}).get("digest") for row in range(len(side))]
        for row in side.values:
            found[row] = side.checksum(row)
        return found
    return [None if dtype is None else side.checksum(row) for row, dtype in enumerate(side.dtype)]
