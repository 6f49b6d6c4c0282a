"""Writer of the page of graphs: one html file with all ranks and steps, which opens without a network.

What is added goes packed to a temporary file at once, so only one pair of graphs is in memory; `finish` streams the page from there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from msprobe_engine.core.io.output_files import WholeFile, guard_writing
from msprobe_engine.core.text.ranges import ranges_of
from msprobe_engine.report.graph.nodes.model import Comparison, Graph
from msprobe_engine.report.graph.page import details, flow
from msprobe_engine.report.graph.page.folded import both_folded, fold_long_rows
from msprobe_engine.report.graph.page.page_data import NONFINITE_OUT, UNMATCHED, Order, columns, stacks
from msprobe_engine.report.graph.same_graphs import Alike
from msprobe_engine.report.web.page import Packed, Verdict, pack, page
from msprobe_engine.report.web.sentences import both
from msprobe_engine.report.web.words import needs_scripts

_DATA = ("columns", "store", "texts", "compare")
_CANVAS = ("path", "layout", "draw", "edges", "minimap", "tools", "gestures", "canvas")
_PANELS = ("tree", "panel", "search", "filters", "details", "worst", "overview", "side", "bar", "status", "split", "keys")
STYLES = ("graph/graph.css", "graph/panels/panels.css")
SCRIPTS = tuple(
    f"graph/{name}.js"
    for name in (*_DATA, *(f"canvas/{name}" for name in _CANVAS), *(f"panels/{name}" for name in _PANELS), "address", "app")
)


class PageWriter:
    """Writes one page.

    Args:
        path: of the file, replaced when it is there.
        target: what is shown, as a text.
        golden: what it is compared with; None: with nothing.
        first: (step, rank) where the first suspect of all is, which the page shows first.
        alike: ranks without a graph of their own.

    Raises:
        SinkError: nothing can be written beside it.
    """

    def __init__(
        self,
        path: Path,
        title: str,
        target: str,
        golden: str | None = None,
        *,
        first: tuple[int, int] | None = None,
        alike: Alike | None = None,
    ) -> None:
        self.path = path
        self.title = title
        self._about: dict[str, Any] = {"title": title, "target": target, "golden": golden, "comparison": golden is not None, "task": None}
        self._about["first"] = None if first is None else {"step": first[0], "rank": first[1]}
        self._alike = alike or Alike()
        self._about["map"] = _map(self._alike)
        self._pairs: list[dict[str, Any]] = []
        self._islands: list[tuple[str, int, int]] = []
        with guard_writing(self.path, "name another place"):
            self._spool: IO[bytes] = tempfile.TemporaryFile(dir=path.parent, prefix=f".{path.name}.")  # noqa: SIM115 - closed by finish, abort

    def add(self, shown: Graph | Comparison) -> None:
        """Put the graphs of a rank and step into the page.

        Raises:
            SinkError: the disk is full.
        """
        position = len(self._pairs)
        if isinstance(shown, Comparison):
            self._about["task"] = shown.task
            self._pairs.append(self._comparison(position, shown))
        else:
            self._pairs.append(self._alone(position, shown))
        self._pairs[-1]["same"] = ranges_of(self._alike.same.get((shown.step, shown.rank), ()))

    def finish(self) -> list[Path]:
        """Write the page and return its path.

        Raises:
            SinkError: it cannot be written; what stood at the path stays.
        """
        verdict: Verdict | None = "bad" if any(pair["suspect"] >= 0 for pair in self._pairs) else "good"
        if self._about["task"] == "structure":
            verdict = None  # there are no numbers, so nothing is known to be right
        pieces = page(
            self.title,
            kind="graph",
            body=f'<div id="graph"></div>{needs_scripts()}',
            styles=STYLES,
            scripts=SCRIPTS,
            data=self._data(),
            verdict=verdict,
            app=True,
        )
        with contextlib.closing(self._spool), guard_writing(self.path, "name another place"), WholeFile(self.path) as whole:
            whole.file.writelines(pieces)
        return [self.path]

    def abort(self) -> None:
        self._spool.close()

    def _data(self) -> Iterator[tuple[str, bytes]]:
        manifest = {**self._about, "block": details.BLOCK, "pairs": self._pairs}
        yield "graph-manifest", json.dumps(manifest, separators=(",", ":"), allow_nan=False).encode()
        # Columns first: a browser shows them while the details still come in.
        for name, start, length in sorted(self._islands, key=lambda island: not island[0].endswith("-columns")):
            self._spool.seek(start)
            yield name, Packed(self._spool.read(length))

    def _spool_island(self, name: str, content: bytes) -> None:
        packed = pack(content)
        with guard_writing(self.path, "name another place"):
            start = self._spool.seek(0, os.SEEK_END)
            self._spool.write(packed)
        self._islands.append((name, start, len(packed)))

    def _alone(self, position: int, graph: Graph) -> dict[str, Any]:
        graph = fold_long_rows(graph)
        order = Order(graph)
        island, flags = columns(graph, order)
        self._side(f"graph-{position}-0", graph, order, island, details.blocks(graph, order))
        return {
            "step": graph.step,
            "rank": graph.rank,
            "nodes": [len(order)],
            "microSteps": graph.micro_step_count,
            "suspect": -1 if graph.suspect is None else int(order.places[graph.suspect]),
            "suspectName": None if graph.suspect is None else graph.names[graph.suspect],
            "suspectText": both(graph.suspect_text),
            "worst": None,
            "unmatched": [0],
            "nonfinite": int(np.count_nonzero(flags & NONFINITE_OUT)),
            "problems": [both(problem) for problem in graph.problems],
        }

    def _comparison(self, position: int, shown: Comparison) -> dict[str, Any]:
        shown = both_folded(shown)
        target, golden = shown.target, shown.golden
        target_order, golden_order = Order(target), Order(golden)
        partners = _partners(shown.partners, target_order, golden_order)
        golden_partners = _partners(shown.golden_partners, golden_order, target_order)
        structure = _mask(target_order, shown.by_structure)
        units = np.asarray(shown.units, np.float64)[target_order.nodes]
        index = np.array([np.nan if value is None else value for value in shown.index], np.float64)[target_order.nodes]
        sources, golden_sources = flow.producers(target), flow.producers(golden)
        rows = shown.golden_rows
        if rows is not None:
            flow.follow_partners(sources, target, golden, golden_sources, rows, shown.golden_partners)
        target_columns, flags = columns(
            target,
            target_order,
            producers=sources,
            partners=partners,
            units=units,
            index=index,
            by_structure=structure,
            needless=_mask(target_order, shown.needless[0]),
        )
        golden_units = np.full(len(golden_order), np.nan)
        golden_units[golden_partners >= 0] = units[golden_partners[golden_partners >= 0]]
        golden_columns, golden_flags = columns(
            golden,
            golden_order,
            producers=golden_sources,
            partners=golden_partners,
            units=golden_units,
            needless=_mask(golden_order, shown.needless[1]),
        )
        metrics = shown.metrics if shown.task == "all" else None  # else both sides' rows say it
        back = _inverse(rows, len(golden.side)) if rows is not None and golden.side is not None else None
        self._side(
            f"graph-{position}-0",
            target,
            target_order,
            target_columns,
            details.blocks(target, target_order, other=golden.side, partner_rows=rows, metrics=metrics),
        )
        self._side(
            f"graph-{position}-1",
            golden,
            golden_order,
            golden_columns,
            details.blocks(golden, golden_order, other=target.side, partner_rows=back),
        )
        suspect = -1 if shown.suspect is None else int(target_order.places[shown.suspect])
        largest = float(np.fmax.reduce(units, initial=0.0))
        return {
            "step": shown.step,
            "rank": shown.rank,
            "nodes": [len(target_order), len(golden_order)],
            "microSteps": target.micro_step_count,
            "suspect": suspect,
            "suspectName": target.names[shown.suspect] if shown.suspect is not None else None,
            "suspectText": both(shown.suspect_text),
            "worst": largest if math.isfinite(largest) else "inf",
            "unmatched": [int(np.count_nonzero(node_flags & UNMATCHED)) for node_flags in (flags, golden_flags)],
            "nonfinite": int(np.count_nonzero(flags & NONFINITE_OUT)),
            "problems": [both(problem) for problem in (*target.problems, *golden.problems)],
        }

    def _side(self, name: str, graph: Graph, order: Order, island: bytes, blocks: Iterator[bytes]) -> None:
        self._spool_island(f"{name}-columns", island)
        self._spool_island(f"{name}-stacks", stacks(graph, order))
        for number, block in enumerate(blocks):
            self._spool_island(f"{name}-details{number}", block)


def _map(alike: Alike) -> dict[str, Any] | None:
    """Where all ranks stand in the job; None where each has a graph."""
    ranks = sorted(alike.places)
    places = [[alike.places[rank][axis] for rank in ranks] for axis in range(len(alike.axes))]
    return {"axes": alike.axes, "ranks": ranks, "places": places} if alike.same else None


def _partners(partners: list[int], own_order: Order, other_order: Order) -> Any:
    """Per place of one side the place of the partner on the other, -1 without one."""
    partner_nodes = np.array(partners, np.int64)[own_order.nodes]
    return np.where(partner_nodes >= 0, other_order.places[partner_nodes], -1)


def _mask(order: Order, nodes: set[int]) -> Any:
    found = np.zeros(len(order), bool)
    found[order.places[list(nodes)]] = True
    return found


def _inverse(rows: Any, count: int) -> Any:
    found = np.full(count, -1, np.int64)
    paired = np.flatnonzero(rows >= 0)
    found[rows[paired]] = paired
    return found
