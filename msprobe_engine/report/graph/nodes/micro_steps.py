"""Which micro batch of a step each node belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msprobe_engine.core import names
from msprobe_engine.report.graph.nodes.model import API, API_COLLECTION, MULTI_COLLECTION, ROOT, Graph

_MOST = 32_767
"""Largest number of a micro step that is one; what is beyond it is damage, and files of graphs could not hold it."""


def set_micro_steps(graph: Graph, construct: Mapping[str, Any]) -> None:
    """Number the micro steps of a graph, from 0.

    construct.json may say them (``[parent, micro step]``, Megatron under 26.2.0). Else a forward call of a module at the top that follows
    a backward one begins the next, and what stands between them belongs to the current one.
    """
    said = _read_micro_steps(construct)
    if said:
        _as_said(graph, said)
    else:
        _by_order(graph)
    graph.micro_step_count = max(graph.micro_steps, default=0) + 1


def copy_to_golden(target: Graph, golden: Graph, partners: Sequence[int], exact: bool) -> None:
    """Let the golden side's nodes have the micro steps of their partners, so that both sides of one are shown together.

    Args:
        target, golden: the graphs; when the construct.json of the target says the micro steps, those of the golden side are left.
        partners: golden node of each target node, -1 for none.
        exact: nodes below the root without a partner have the number that their name ends with, as in the existing tool; else the micro
            step of the node before them.
    """
    if target.side is None or _read_micro_steps(target.side.construct):
        return
    at_top = golden.children[ROOT]
    known: dict[int, int] = {}
    for node in target.children[ROOT]:
        if partners[node] >= 0:
            known[partners[node]] = target.micro_steps[node]
    current = 0
    for node in at_top:
        last = golden.names[node].rpartition(".")[2]
        current = known.get(node, (int(last) if last.isdecimal() and len(last) < 5 else 0) if exact else current)
        golden.micro_steps[node] = current
        _inherit(golden, node)
    for node in known.keys() - set(at_top):
        golden.micro_steps[node] = known[node]
        _inherit(golden, node)
    golden.micro_step_count = max(golden.micro_steps, default=0) + 1


def _read_micro_steps(construct: Mapping[str, Any]) -> dict[str, int]:
    said = {name: names.node_micro_step(node) for name, node in construct.items()}
    return {name: number for name, number in said.items() if number is not None and number <= _MOST}


def _by_order(graph: Graph) -> None:
    current, backward = 0, False
    for node in graph.children[ROOT]:
        if graph.types[node] not in (API, API_COLLECTION, MULTI_COLLECTION):
            way = names.direction(graph.names[node])
            if way == names.FORWARD and backward:
                current += 1
                backward = False
            elif way == names.BACKWARD:
                backward = True
        graph.micro_steps[node] = current
        _inherit(graph, node)


def _inherit(graph: Graph, top: int) -> None:
    waiting = [top]
    while waiting:
        node = waiting.pop()
        for child in graph.children[node]:
            graph.micro_steps[child] = graph.micro_steps[node]
        waiting += graph.children[node]


def _as_said(graph: Graph, said: Mapping[str, int]) -> None:
    waiting = [ROOT]
    while waiting:
        node = waiting.pop()
        for child in graph.children[node]:
            number = said.get(graph.names[child], -1)
            if number < 0 and graph.types[child] in (API_COLLECTION, MULTI_COLLECTION) and graph.children[child]:
                number = said.get(graph.names[graph.children[child][0]], -1)
            graph.micro_steps[child] = number if number >= 0 else graph.micro_steps[node]
        waiting += graph.children[node]
