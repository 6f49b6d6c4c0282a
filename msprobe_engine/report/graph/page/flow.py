"""Which node gave the tensors that a node takes: by equal numbers, and where these are NaN or Inf, which all look alike, by other means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, DumpTable
from msprobe_engine.measure import distances, factorize
from msprobe_engine.report.graph.nodes.model import Graph

Numbers = npt.NDArray[np.int64]


def producers(graph: Graph) -> Numbers:
    """int64 (rows,): the node whose output the tensor of a row is, -1 where that is not known.

    Numbers that are not finite are taken to come from the last call before that gave such ones in the same shape.
    """
    side = graph.side
    if side is None or not len(side):
        return np.zeros(0, np.int64)
    records = np.array(Tree(side).producers.records, np.int64)
    node_of = np.array(graph.node_of_record, np.int64)
    nodes = np.where(records >= 0, node_of[records], -1)
    bad = np.flatnonzero(_nonfinite(side))
    shapes, _ = factorize.number_objects(side.shape)
    role, last = side.role, dict[int, int]()
    for row in bad.tolist():
        node, shape = int(node_of[side.op[row]]), int(shapes[row])
        if role[row] == INPUT:
            nodes[row] = last.get(shape, -1)
        elif role[row] == OUTPUT and node >= 0 and not graph.children[node]:
            last[shape] = node  # of a module and the call in it that made its output, the call
    return np.asarray(nodes)


def follow_partners(sources: Numbers, graph: Graph, other: Graph, other_sources: Numbers, rows: Numbers, partners: Sequence[int]) -> None:
    """Where numbers of `graph` are not finite, take over what the finite ones of the other run say.

    Args:
        sources: `producers` of the graph, changed in place.
        graph: may hold NaN and Inf.
        other_sources: `producers` of the other run.
        rows: row -> row of the other run, -1 where there is none.
        partners: node of the other run -> node of the graph, -1.
    """
    if graph.side is None or other.side is None or not len(graph.side) or not len(other.side):
        return
    role = np.frombuffer(bytes(graph.side.role), np.uint8)
    bad = np.flatnonzero(_nonfinite(graph.side) & (role == INPUT) & (rows >= 0))
    bad = bad[~_nonfinite(other.side)[rows[bad]]]
    source = other_sources[rows[bad]]
    nodes = np.array([*partners, -1], np.int64)[source]  # -1 is the last
    sources[bad[nodes >= 0]] = nodes[nodes >= 0]


def _nonfinite(side: DumpTable) -> npt.NDArray[np.bool_]:
    """bool (rows,): tensors that hold NaN or Inf; the number inf as an argument came from no call."""
    return np.asarray(distances.nonfinite(side, range(len(side))) & ~factorize.mask(side.values, len(side)))
