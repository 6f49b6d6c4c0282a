"""What the page of graphs holds of one side of one rank and step: columns of its nodes, read by ``web/graph/columns.js``.

Nodes are numbered anew in order of execution, an enclosing node before what it encloses: then the size of each subtree says all of the
hierarchy, names that follow each other are alike and pack well, and a subtree is a range.

An island of columns is: the text ``MPG1``, the length of a JSON header as uint32, the header, zeros up to a multiple of 8, then the
columns, each at a multiple of 8. All numbers are little-endian. The header: ``columns``: name -> [kind, offset, length]; ``links``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.names import is_collective
from msprobe_engine.core.text.ranges import ranges_of
from msprobe_engine.formats.dump.dump_table import OUTPUT, PARAMETERS_GRAD
from msprobe_engine.measure import distances
from msprobe_engine.report.graph.nodes.build import is_gradients
from msprobe_engine.report.graph.nodes.model import Graph, Link
from msprobe_engine.report.graph.page import flow

BACKWARD, NONFINITE_IN, NONFINITE_OUT, UNMATCHED, RECOMPUTE, LINKED = 1, 2, 4, 8, 16, 32
BY_STRUCTURE, COLLECTIVE, NEEDLESS = 256, 512, 4096
OVERFLOW = {"medium": 64, "high": 128, "critical": 192}
"""Bits of the column ``flags``; ``Graph.FLAG`` of columns.js has the same."""

_MAGIC = b"MPG1"

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Order:
    """The nodes of a graph in the order of the page.

    Attributes:
        nodes: int64, the node of the graph at each place of the page.
        places: int64, the place of each node of the graph; -1 of nodes that hang below nothing.
        sizes: int64, nodes of the subtree at each place, itself included.
    """

    def __init__(self, graph: Graph) -> None:
        children = graph.children
        nodes: list[int] = []
        waiting = [0]
        while waiting:
            node = waiting.pop()
            nodes.append(node)
            waiting.extend(reversed(children[node]))
        self.nodes: Numbers = np.array(nodes, np.int64)
        self.places: Numbers = np.full(len(graph), -1, np.int64)
        self.places[self.nodes] = np.arange(len(nodes))
        sizes = [1] * len(graph)
        parents = graph.parents
        for node in reversed(nodes):
            if parents[node] >= 0:
                sizes[parents[node]] += sizes[node]
        self.sizes: Numbers = np.array(sizes, np.int64)[self.nodes]

    def __len__(self) -> int:
        return len(self.nodes)


def columns(
    graph: Graph,
    order: Order,
    *,
    producers: Numbers | None = None,
    partners: Numbers | None = None,
    units: Floats | None = None,
    index: Floats | None = None,
    by_structure: npt.NDArray[np.bool_] | None = None,
    needless: npt.NDArray[np.bool_] | None = None,
) -> tuple[bytes, npt.NDArray[np.uint16]]:
    """An island of columns, and the flags in it.

    Args:
        order: its nodes in the order of the page.
        producers: row -> node it comes from; None: `flow.producers`.
        partners: per place of the page the place of the partner on the other side, -1 without one; None: there is no other side.
        units: per place of the page multiples of round-off.
        index: per place of the page the precision index, NaN where there is none.
        by_structure: per place of the page, was the partner found by the place in the hierarchy?
        needless: per place of the page, is there no partner and none needed?
    """
    flags = _flags(graph, order)
    if partners is not None:
        flags[(partners < 0) & (np.arange(len(order)) > 0)] |= UNMATCHED
    if needless is not None:
        flags[needless] = (flags[needless] & ~np.uint16(UNMATCHED)) | NEEDLESS
    if by_structure is not None:
        flags[by_structure] |= BY_STRUCTURE
    nothing = np.full(len(order), np.nan, np.float32)
    counts, back = _edges(graph, order, flow.producers(graph) if producers is None else producers)
    names, ends = _names([graph.names[node] for node in order.nodes.tolist()])
    stack, _ = _stacks(graph, order)
    held: dict[str, npt.NDArray[Any]] = {
        "size": order.sizes.astype("<i4"),
        "type": np.array(graph.types, np.uint8)[order.nodes],
        "flags": flags.astype("<u2"),
        "units": nothing if units is None else units.astype("<f4"),
        "index": nothing if index is None else index.astype("<f4"),
        "partner": (np.full(len(order), -1) if partners is None else partners).astype("<i4"),
        "micro": np.array(graph.micro_steps, np.int64)[order.nodes].clip(-1, 32767).astype("<i2"),
        "stack": stack,
        "name_end": ends,
        "names": names,
        "edge_count": counts,
        "edge_back": back,
    }
    return _pack_columns(held, {"links": {int(order.places[node]): _encode_links(several) for node, several in graph.links.items()}}), flags


def _encode_links(several: Sequence[Link]) -> list[Any]:
    """``[ranks, name, level, kind]`` of the calls that one belongs together with; ranks whose calls are alike stand together."""
    ranks_of: dict[tuple[Any, ...], list[int]] = {}
    for link in several:
        for rank, (level, name) in sorted(link.nodes_info.items()):
            ranks_of.setdefault((name, level, link.communications_type), []).append(rank)
    return [[ranges_of(ranks), *key] for key, ranks in ranks_of.items()]


def stacks(graph: Graph, order: Order) -> bytes:
    """An island of the different call stacks: ``{"lines": [text], "stacks": [[line number]]}``, the innermost line first."""
    lines: dict[str, int] = {}
    _, found = _stacks(graph, order)
    numbers = [[lines.setdefault(line, len(lines)) for line in stack] for stack in found]
    return json.dumps({"lines": list(lines), "stacks": numbers}, separators=(",", ":")).encode()


def _pack_columns(held: Mapping[str, npt.NDArray[Any]], header: dict[str, Any]) -> bytes:
    kinds = {"uint8": "u1", "uint16": "u2", "int16": "i2", "int32": "i4", "uint32": "u4", "float32": "f4"}
    at, parts, described = 0, [], {}
    for name, column in held.items():
        described[name] = [kinds[column.dtype.name], at, len(column)]
        content = column.tobytes()
        content += b"\0" * (-len(content) % 8)
        parts.append(content)
        at += len(content)
    text = json.dumps({"columns": described, **header}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    return b"".join((_MAGIC, len(text).to_bytes(4, "little"), text, *parts))


def _names(names: list[str]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """All names one after the other in UTF-8, and where each ends, counted as JavaScript counts characters (UTF-16 code units)."""
    whole = "".join(names)
    if whole.isascii():
        ends = np.cumsum([len(name) for name in names])
    else:
        names = [name.encode("utf-16-le", "replace").decode("utf-16-le") for name in names]  # half a surrogate pair is no text
        whole = "".join(names)
        ends = np.cumsum([len(name.encode("utf-16-le")) // 2 for name in names])
    return np.frombuffer(whole.encode(), np.uint8), ends.astype("<u4")


def _stacks(graph: Graph, order: Order) -> tuple[npt.NDArray[np.int32], list[tuple[str, ...]]]:
    """Per place the number of its call stack, -1 without one; and the different ones. Equal stacks are one object in a graph."""
    numbers: dict[int, int] = {}
    stacks: list[tuple[str, ...]] = []
    column = np.full(len(order), -1, "<i4")
    for place, node in enumerate(order.nodes.tolist()):
        stack = graph.stacks[node]
        if stack:
            number = numbers.setdefault(id(stack), len(stacks))
            if number == len(stacks):
                stacks.append(stack)
            column[place] = number
    return column, stacks


def _flags(graph: Graph, order: Order) -> npt.NDArray[np.uint16]:
    flags = np.zeros(len(graph), np.uint16)
    for node, name in enumerate(graph.names):
        if ".backward." in name or name.endswith(".backward") or is_gradients(name):
            flags[node] |= BACKWARD
        if is_collective(name):
            flags[node] |= COLLECTIVE
    for node, level in enumerate(graph.overflow):
        if level:
            flags[node] |= OVERFLOW.get(level, 0)
    for node in graph.links:
        flags[node] |= LINKED
    side = graph.side
    if side is not None and len(side):
        for record, tags in side.tags.items():
            if tags.get("is_recompute") and graph.node_of_record[record] >= 0:
                flags[graph.node_of_record[record]] |= RECOMPUTE
        bad = np.flatnonzero(distances.nonfinite(side, range(len(side))))
        nodes = np.array(graph.node_of_record, np.int64)
        for row in bad.tolist():
            node, comes_out = nodes[side.op[row]], side.role[row] in (OUTPUT, PARAMETERS_GRAD)
            if node >= 0 and (comes_out or row not in side.values):  # the number inf as an argument (a limit) is nothing that goes wrong
                flags[node] |= NONFINITE_OUT if comes_out else NONFINITE_IN
    return flags[order.nodes]


def _edges(graph: Graph, order: Order, producers: Numbers) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int32]]:
    """Per place how many nodes it takes tensors from, and how far before it each stands. What is inside of one another has no edge."""
    counts = np.zeros(len(order), np.int64)
    side = graph.side
    if side is None or not len(producers):
        return counts.astype("<u2"), np.zeros(0, "<i4")
    rows = np.flatnonzero(producers >= 0)
    sources, takers = producers[rows], np.array(graph.node_of_record, np.int64)[np.array(side.op, np.int64)[rows]]
    sources, takers = order.places[sources[takers >= 0]], order.places[takers[takers >= 0]]
    known = (sources >= 0) & (takers >= 0)
    sources, takers = sources[known], takers[known]
    sizes = order.sizes
    inside = ((takers >= sources) & (takers < sources + sizes[sources])) | ((sources >= takers) & (sources < takers + sizes[takers]))
    pairs = np.unique(takers[~inside] * len(order) + sources[~inside])
    takers, sources = pairs // len(order), pairs % len(order)
    few = np.arange(len(takers)) - np.searchsorted(takers, takers) < 65535  # a count is 16 bits
    takers, sources = takers[few], sources[few]
    np.add.at(counts, takers, 1)
    return counts.astype("<u2"), (takers - sources).astype("<i4")
