"""Which communication calls of different ranks belong together (``matched_distributed``).

The k-th call of an operation by every rank of a group is one collective, the k-th message from one rank to another meets the k-th receive
there (`find.collectives.links`); from the root of a broadcast or scatter data go to all others, to that of a gather or reduce from all
others. More is linked than the existing tool links: collectives of the default group, roots given by name, messages that carry NaN, and
those of ``batch_isend_irecv``, of which there is a link each.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msprobe_engine.core.operator_traits import normal_op
from msprobe_engine.find.collectives.links import match
from msprobe_engine.formats.dump.collective_record import SENDS, p2p_items
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.report.graph.nodes.model import Cell, Comparison, Graph, Link
from msprobe_engine.report.graph.options import GraphOptions

SEND, RECEIVE, BOTH = "send", "receive", "send_receive"

Linked = dict[int, tuple[Link, ...]]
"""Node -> the calls of other ranks it belongs together with."""


@dataclass(frozen=True)
class Call:
    """One communication call of a rank: what has to be known of it when all ranks are.

    Attributes:
        node: of the graph; calls stand in order of execution.
        op: record of the graph's side.
        record: as the dump has it.
        mark: precision index, or overflow level when these were asked for; None without one.
    """

    node: int
    op: int
    name: str
    record: Mapping[str, Any]
    mark: Cell = None


def calls(made: Graph | Comparison, options: GraphOptions) -> tuple[list[Call], ...]:
    """The communication calls of a graph, or of both graphs of a comparison."""
    if not isinstance(made, Comparison):
        return (_calls(made, made.overflow),)
    if options.overflow:
        return _calls(made.target, made.target.overflow), _calls(made.golden, made.golden.overflow)
    index = made.index_811 if options.old else made.index
    return _calls(made.target, index), _calls(made.golden, [None] * len(made.golden))


def _calls(graph: Graph, marks: list[Any]) -> list[Call]:
    side = graph.side
    if side is None:
        return []
    nodes = ((graph.node_of_record[op], op) for op in sorted(side.collectives))
    return [Call(node, op, side.ops[op], side.collectives[op], marks[node]) for node, op in nodes if node >= 0]


def calls_as(some: Sequence[Call], side: DumpTable) -> list[Call]:
    """The calls of a graph with the ranks that another side names in them, which makes the same calls."""
    return [replace(call, record=side.collectives[call.op]) for call in some]


def link(ranks: Mapping[int, Sequence[Call]], drawn: Container[int]) -> dict[int, Linked]:
    """Link the calls of all ranks of a step.

    Args:
        ranks: rank -> its calls.
        drawn: those whose links are asked for.

    Returns:
        Rank -> links of its nodes.
    """
    links: dict[int, dict[int, list[Link]]] = {rank: {} for rank in ranks if rank in drawn}

    def add(position: tuple[int, int], word: str, others: list[tuple[int, int]]) -> None:
        if position[0] not in links:
            return
        info = {rank: (ranks[rank][place].mark, ranks[rank][place].name) for rank, place in others if rank != position[0]}
        if info:
            links[position[0]].setdefault(ranks[position[0]][position[1]].node, []).append(Link(word, info))

    records = {rank: [(position, call.name, call.record) for position, call in enumerate(some)] for rank, some in ranks.items()}
    for call_link in match(records).links:
        sources, sinks, members = list(call_link.sources), list(call_link.sinks), list(call_link.members)
        for position in members:
            if len(sources) == len(sinks) == len(members):
                add(position, BOTH, members)
            elif sources == [position] or (position not in sinks):
                add(position, SEND, sinks)
            else:
                add(position, RECEIVE, sources)
    return {rank: {node: tuple(some) for node, some in _in_order(nodes, ranks[rank]).items()} for rank, nodes in links.items()}


def _in_order(nodes: Mapping[int, list[Link]], some: Sequence[Call]) -> Mapping[int, list[Link]]:
    """Links of a batch of messages in the order of the messages."""
    for call in some:
        batch = nodes.get(call.node, ())
        if len(batch) > 1:
            items = p2p_items([call.record.get("input_args"), call.record.get("input_kwargs")])
            places: dict[tuple[bool, Any], int] = {}
            for position, item in enumerate(items):
                places.setdefault((normal_op(str(item.get("op"))) in SENDS, item.get("peer")), position)
            nodes[call.node].sort(key=lambda linked: places.get((linked.communications_type == SEND, min(linked.nodes_info)), len(places)))
    return nodes
