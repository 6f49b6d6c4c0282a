"""Writes graphs as one json file that Model Explorer opens (``model-explorer FILE``): a graph per step, rank and side.

Format: ``GraphCollection`` in ``input_graph.ts`` of google-ai-edge/model-explorer. Calls without others inside are nodes; what encloses
them is the namespace they stand in, whose attributes Model Explorer shows when it is selected. Edges are the flow of tensors; one that
comes out of a whole module begins at the last call in it.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.core.io.output_files import WholeFile, guard_writing
from msprobe_engine.report.graph.existing.items import items
from msprobe_engine.report.graph.nodes.model import ROOT, Comparison, Graph
from msprobe_engine.report.graph.writer import Plan

_COLOURS = ((1.0, "#FFFCF3"), (4.0, "#FFDC7F"), (math.inf, "#FF704D"))
"""Of differences up to so many times what rounding explains, as on our own page."""
_VERDICTS = {0.0: "pass", 0.5: "warning", 1.0: "error"}
_UNMATCHED = "#C7C7C7"
_SHOWN_AS = {"dtype": "dtype", "shape": "tensor_shape"}
"""Fields of ours under the names that Model Explorer writes on edges."""


class ModelExplorerWriter:
    """One file, written graph by graph.

    Raises:
        SinkError: the file cannot be made.
    """

    def __init__(self, plan: Plan) -> None:
        self._path = plan.output / f"{plan.word}_{plan.stamp}.model_explorer.json"
        self._between = "\n"
        with guard_writing(self._path, "name another place"):
            self._whole = WholeFile(self._path)
            self._file = io.TextIOWrapper(self._whole.file, encoding="utf-8")
            self._file.write(f'{{"label": {json.dumps(f"{plan.word} {plan.stamp}")}, "graphs": [')

    def add(self, made: Graph | Comparison) -> None:
        """Take the next one.

        Raises:
            SinkError: it cannot be written.
        """
        sides = [("run", made)] if isinstance(made, Graph) else [("run", made.target), ("golden", made.golden)]
        with guard_writing(self._path, "name another place"):
            for source, graph in sides:
                compared = made if isinstance(made, Comparison) and source == "run" else None
                self._file.write(self._between)
                self._file.writelines(_graph(f"step {made.step} rank {made.rank} {source}", graph, compared))
                self._between = ",\n"

    def finish(self) -> list[Path]:
        """The file has its name.

        Raises:
            SinkError: it cannot be written.
        """
        with guard_writing(self._path, "name another place"):
            self._file.write("]}\n")
            self._file.close()
            self._whole.commit()
        return [self._path]

    def abort(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._whole.abort()


def _graph(name: str, graph: Graph, compared: Comparison | None) -> Iterator[str]:
    spaces, taken = _namespaces(graph), _find_producers(graph)
    groups: dict[str, dict[str, str]] = {}
    yield f'{{"id": {json.dumps(name)}, "nodes": ['
    between = "\n"
    for node, space in enumerate(spaces):
        if graph.children[node]:
            if node != ROOT:
                groups[_inside(space, graph.names[node])] = _attributes(graph, node, compared)
            continue
        yield f"{between}{json.dumps(_node(graph, node, space, taken.get(node, []), compared))}"
        between = ",\n"
    yield f'],\n"groupNodeAttributes": {json.dumps(groups)}}}'


def _inside(space: str, name: str) -> str:
    """The namespace of what is inside of a node; a slash in its name would be another level."""
    name = name.replace("/", "\u2215")
    return f"{space}/{name}" if space else name


def _namespaces(graph: Graph) -> list[str]:
    """Per node the names of what encloses it, without the root."""
    found = [""] * len(graph)
    waiting = list(graph.children[ROOT])
    while waiting:
        node = waiting.pop()
        for child in graph.children[node]:
            found[child] = _inside(found[node], graph.names[node])
            waiting.append(child)
    return found


def _find_producers(graph: Graph) -> dict[int, list[tuple[int, int, int]]]:
    """Node without children -> (number of the input, node that made it, number of its output)."""
    inputs_of: dict[int, list[tuple[int, int, int]]] = {}
    side = graph.side
    if side is None:
        return inputs_of
    producers = Tree(side).producers
    for node in range(len(graph)):
        if graph.children[node]:
            continue
        for number, row in enumerate(graph.inputs(node)):
            maker = graph.node_of_record[record] if (record := producers.get(row)) is not None else -1
            while maker >= 0 and graph.children[maker]:
                maker = graph.children[maker][-1]
            if maker >= 0 and maker != node:
                inputs_of.setdefault(node, []).append((number, maker, _output(graph, maker, row)))
    return inputs_of


def _output(graph: Graph, maker: int, row: int) -> int:
    """The first output of a node that has the dtype and shape of a row; the first of all when none has."""
    side = graph.side
    assert side is not None
    wanted = side.dtype[row], side.shape[row]
    return next((at for at, one in enumerate(graph.outputs(maker)) if (side.dtype[one], side.shape[one]) == wanted), 0)


def _node(graph: Graph, node: int, space: str, taken: list[tuple[int, int, int]], compared: Comparison | None) -> dict[str, Any]:
    given, results = items(graph, node, compared.metrics(node) if compared is not None else None)
    made: dict[str, Any] = {
        "id": graph.names[node],
        "label": graph.names[node],
        "namespace": space,
        "attrs": [{"key": key, "value": value} for key, value in _attributes(graph, node, compared).items()],
        "incomingEdges": [
            {"sourceNodeId": graph.names[maker], "sourceNodeOutputId": str(output), "targetNodeInputId": str(number)}
            for number, maker, output in taken
        ],
        "inputsMetadata": _metadata(given),
        "outputsMetadata": _metadata(results),
    }
    if compared is not None:
        units = float(compared.units[node])
        if compared.partners[node] < 0:
            made["style"] = {"backgroundColor": _UNMATCHED}
        elif not math.isnan(units):
            made["style"] = {"backgroundColor": next(colour for most, colour in _COLOURS if units <= most)}
    return made


def _metadata(rows: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    return [
        {"id": str(at), "attrs": [{"key": "name", "value": name}, *({"key": _SHOWN_AS.get(k, k), "value": v} for k, v in item.items())]}
        for at, (name, item) in enumerate(rows.items())
    ]


def _attributes(graph: Graph, node: int, compared: Comparison | None) -> dict[str, str]:
    """What is said of a node beside its rows."""
    attributes: dict[str, str] = {"micro step": str(graph.micro_steps[node])}
    if (level := graph.overflow[node]) is not None:
        attributes["overflow"] = level
    suspect = graph.suspect if compared is None else compared.suspect
    if suspect == node:
        attributes["first suspect"] = graph.suspect_text if compared is None else compared.suspect_text
    if compared is not None:
        partner, index = compared.partners[node], compared.index[node]
        attributes["partner"] = compared.golden.names[partner] if partner >= 0 else "none"
        if index is not None:
            attributes["verdict of 26.2.0"] = _VERDICTS[index]
        if (units := float(compared.units[node])) == units:
            attributes["units of round-off"] = f"{units:.6g}"
    for link in graph.links.get(node, ()):
        for rank, (_, name) in link.nodes_info.items():
            attributes[f"{link.communications_type} rank {rank}"] = name
    for number, note in enumerate(graph.merge_notes.get(node, ())):
        attributes[f"merged {number}"] = note
    if graph.stacks[node]:
        attributes["called at"] = graph.stacks[node][0]
    return attributes
