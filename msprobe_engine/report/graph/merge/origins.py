"""Where a record of one rank's dump is in a graph that was made of several ranks."""

from __future__ import annotations

from msprobe_engine.align.parallel.merge_records import origin_of
from msprobe_engine.report.graph.nodes.model import Graph


def node_of(graph: Graph, rank: int, name: str) -> int | None:
    """The node of a record.

    Args:
        graph: of one rank, or of several.
        rank: whose dump the record is in.

    Returns:
        None when the graph has no such record. The rows of a rank that was merged with others are those of the first of them, which is the
        nearest before it that has the record.
    """
    side = graph.side
    if side is None:
        return graph.index.get(name)
    best, found = -1, None
    for op in range(len(side.ops)):
        origin = origin_of(side, op)
        of_rank, there = origin if origin is not None else (graph.rank, side.ops[op])
        if there == name and best < of_rank <= rank and graph.node_of_record[op] >= 0:
            best, found = of_rank, graph.node_of_record[op]
    return graph.index.get(name) if found is None else found
