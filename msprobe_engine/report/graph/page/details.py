"""What the page of graphs shows of chosen nodes: their rows, in blocks of nodes that the browser inflates when one of them is chosen.

A block is JSON: ``texts`` and ``shapes``, the different ones, and ``nodes``: per node ``[inputs, outputs, metrics, notes]``; a row is
``[place, dtype, shape, max, min, mean, norm, other]``, where the first three are positions in ``texts`` and ``shapes`` (-1: none) and
``other`` is left out or holds what few rows have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.report.graph.nodes.model import Cell, Graph
from msprobe_engine.report.graph.page.page_data import Order
from msprobe_engine.report.web.sentences import both

BLOCK = 2000
"""Nodes of a block."""

_LONGEST = 2000
"""Characters of a value of an argument that are shown."""

Metrics = Callable[[int], Mapping[str, Mapping[str, Cell]]]


def blocks(
    graph: Graph,
    order: Order,
    *,
    other: DumpTable | None = None,
    partner_rows: npt.NDArray[np.int64] | None = None,
    metrics: Metrics | None = None,
) -> Iterator[bytes]:
    """The blocks of a side, one after the other; at least one.

    Args:
        order: its nodes in the order of the page.
        other: the other side's rows.
        partner_rows: row -> row of `other`, -1 where there is none; None: rows of one place belong together.
        metrics: node of `graph` -> row name -> column -> value, where they say more than the statistics of both sides do.
    """
    writer = _Writer(graph, other, partner_rows)
    nodes = order.nodes.tolist()
    for start in range(0, len(nodes), BLOCK):
        yield writer.block(nodes[start : start + BLOCK], metrics)


class _Writer:
    def __init__(self, graph: Graph, other: DumpTable | None, partner_rows: npt.NDArray[np.int64] | None) -> None:
        self.graph = graph
        self.side = graph.side
        self.other = other
        self.partner_rows: list[int] | None = partner_rows.tolist() if partner_rows is not None and other is not None else None
        self.finite: list[bool] = []
        if self.side is not None and len(self.side):
            self.finite = np.isfinite(self.side.stats).all(axis=1).tolist()  # type: ignore[assignment]
        self.texts: dict[str, int] = {}
        self.shapes: dict[str, int] = {}
        self.forms: dict[int, int] = {}

    def block(self, nodes: list[int], metrics: Metrics | None) -> bytes:
        self.texts, self.shapes, self.forms = {}, {}, {}
        found = [self._node(node, metrics) for node in nodes]
        return f'{{"nodes":[{",".join(found)}],"texts":{json.dumps(list(self.texts))},"shapes":[{",".join(self.shapes)}]}}'.encode()

    def _node(self, node: int, metrics: Metrics | None) -> str:
        graph = self.graph
        inputs = ",".join([self._row(row) for row in graph.inputs(node)])
        outputs = ",".join([self._row(row) for row in graph.outputs(node)])
        measured = _dump(self._metrics(node, metrics)) if metrics else "{}"
        notes = graph.merge_notes.get(node)
        return f"[[{inputs}],[{outputs}],{measured},{_dump([both(note) for note in notes]) if notes else '[]'}]"

    def _metrics(self, node: int, metrics: Metrics) -> dict[str, dict[str, Any]]:
        # Characters of a row's name before its place
        record = self.graph.records[node]
        start = len(self.side.ops[record]) + 1 if self.side is not None and record >= 0 else 0
        return {
            name[start:] if start else name: {column: _value(value) for column, value in cells.items()}
            for name, cells in metrics(node).items()
        }

    def _row(self, row: int) -> str:
        side = self.side
        assert side is not None
        texts = self.texts
        place = texts.setdefault(side.name[row][len(side.ops[side.op[row]]) + 1 :], len(texts))
        dtype = side.dtype[row]
        kind = -1 if dtype is None else texts.setdefault(dtype, len(texts))
        form = side.shape[row]
        shape = -1 if form is None else self._shape(form)
        further = self._further(row)
        tail = f",{_dump(further)}" if further else ""
        if self.finite[row]:
            return f"[{place},{kind},{shape},{_numbers(side.numbers[4 * row : 4 * row + 4])}{tail}]"
        values = (None,) * 4 if row in side.values else side.stats_of(row)
        return f"[{place},{kind},{shape},{','.join([_text(value) for value in values])}{tail}]"

    def _shape(self, form: Any) -> int:
        found = self.forms.get(id(form))  # a side has one object for all rows of equal shape
        if found is None:
            found = self.forms[id(form)] = self.shapes.setdefault(_dump(form), len(self.shapes))
        return found

    def _further(self, row: int) -> dict[str, Any]:
        side = self.side
        assert side is not None
        cells: dict[str, Any] = {}
        if row in side.values:
            cells["value"] = _value(side.values[row])
        elif side.md5[row]:
            cells["md5"] = side.md5[row]
        if row in side.nans:
            cells["nans"] = side.nans[row]
        if row in side.infs:
            cells["infs"] = side.infs[row]
        if side.requires_grad[row]:
            cells["requires_grad"] = True
        if side.data_name[row]:
            cells["data_name"] = side.data_name[row]
        if row in side.extra:
            cells["facts"] = {str(key): _value(value) for key, value in side.extra[row].items()}
        if self.partner_rows is not None and self.other is not None:
            partner: int = self.partner_rows[row]
            if partner < 0:
                cells["partner"] = None
            else:
                place = self.other.name[partner][len(self.other.ops[self.other.op[partner]]) + 1 :]
                if place != side.name[row][len(side.ops[side.op[row]]) + 1 :]:
                    cells["partner"] = place
        return cells


def _numbers(four: Any) -> str:
    largest, smallest, mean, norm = four
    return f"{largest:.9g},{smallest:.9g},{mean:.9g},{norm:.9g}"  # nine digits give a float32 back as it was


def _text(value: Any) -> str:
    return f"{value:.9g}" if type(value) is float and math.isfinite(value) else _dump(_value(value))


def _value(value: Any) -> Any:
    """What JSON can hold of it."""
    if type(value) is float and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_dump = json.JSONEncoder(separators=(",", ":"), default=str).encode
