"""Long rows of calls, folded for the page: a dump of level L1 has no modules, and thousands of calls in one column cannot be read.

Calls that follow each other and were made by one function of the program (by their call stacks) are put together; of what is left in one
row, some tens each. These collections are on the page alone: the graph that is drawn is a copy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from msprobe_engine.core.text.source_line import source_of
from msprobe_engine.report.graph.nodes.model import API, API_COLLECTION, Cell, Comparison, Graph

MOST = 100
"""So many calls may stand in one row."""
_PAGE = 50
"""Calls, or collections of calls, that are put together where stacks say nothing."""
_TIMES = 3
"""What has become a row of collections is folded again."""
_LINE = re.compile(r'File "?(.+?)"?, line \d+, in ([^,\n]+)')

Groups = dict[int, list[list[int]]]
"""Node -> its children in groups, in order; one alone stays where it is."""


def fold_long_rows(graph: Graph) -> Graph:
    """The graph, or a copy in which no row of calls is longer than some tens."""
    numbers: Counter[str] = Counter()
    for _ in range(_TIMES):
        groups = _groups(graph)
        if not groups:
            break
        graph = _copy(graph)
        for parent, parts in groups.items():
            _fold(graph, parent, parts, numbers)
    return graph


def both_folded(shown: Comparison) -> Comparison:
    """A comparison in which the same is done on both sides: calls of the golden run go with their partners."""
    numbers: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for _ in range(_TIMES):
        groups = _groups(shown.target)
        if not groups:
            break
        shown = _both(shown, groups, numbers)
    return shown


def _both(shown: Comparison, groups: Groups, numbers: tuple[Counter[str], Counter[str]]) -> Comparison:
    target, golden = _copy(shown.target), _copy(shown.golden)
    partners, back = list(shown.partners), list(shown.golden_partners)
    before = len(target)
    for parent, parts in groups.items():
        made = _fold(target, parent, parts, numbers[0])
        partners += [-1] * len(made)
        twin = partners[parent]
        if twin < 0:
            continue
        group_of = {node: k for k, part in enumerate(parts) for node in part}
        golden_groups: list[list[int]] = []
        known: list[int] = []  # the group of the target that each golden group belongs to
        for node in golden.children[twin]:
            k = group_of.get(back[node], -1)
            if not golden_groups or k > known[-1]:
                if golden_groups and known[-1] < 0:
                    known[-1] = k  # what has no partner at the beginning goes with what comes first
                    golden_groups[-1].append(node)
                    continue
                golden_groups.append([])
                known.append(k)
            golden_groups[-1].append(node)
        named = [target.names[made[k]] if k in made else "" for k in known]
        made_there = _fold(golden, twin, golden_groups, numbers[1], named)
        back += [-1] * len(made_there)
        for position, node in made_there.items():
            if (target_node := made.get(known[position])) is not None:
                partners[target_node], back[node] = node, target_node
    index = shown.index + [None] * (len(target) - before)
    units = np.concatenate([np.asarray(shown.units, np.float64), np.full(len(target) - before, np.nan)])
    for node in range(before, len(target)):
        inside = target.children[node]
        units[node] = np.fmax.reduce(units[inside])
        index[node] = max((value for child in inside if (value := index[child]) is not None), default=None)
    metrics = shown.metrics

    def of_node(node: int) -> Mapping[str, Mapping[str, Cell]]:
        return metrics(node) if node < before else {}

    return dataclasses.replace(
        shown, target=target, golden=golden, partners=partners, golden_partners=back, index=index, units=units, metrics=of_node
    )


def _copy(graph: Graph) -> Graph:
    return dataclasses.replace(
        graph,
        names=list(graph.names),
        types=list(graph.types),
        parents=list(graph.parents),
        children=[list(one) for one in graph.children],
        records=list(graph.records),
        micro_steps=list(graph.micro_steps),
        stacks=list(graph.stacks),
        overflow=list(graph.overflow),
    )


def _groups(graph: Graph) -> Groups:
    found: Groups = {}
    for parent, children in enumerate(graph.children):
        loose = sum(graph.types[node] in (API, API_COLLECTION) for node in children)
        if loose > MOST:
            parts = [list(part) for _, part in groupby(children, lambda node: _caller(graph, node))]
            found[parent] = parts if 1 < len(parts) < len(children) / 2 else _pages(graph, children)
    return found


def _pages(graph: Graph, children: Sequence[int]) -> list[list[int]]:
    """Calls between modules, some tens each; modules stay where they are."""
    pages: list[list[int]] = []
    for loose, part in groupby(children, lambda node: graph.types[node] in (API, API_COLLECTION)):
        row = list(part)
        size = max(_PAGE, math.ceil(math.sqrt(len(row)))) if loose else 1
        pages += [row[start : start + size] for start in range(0, len(row), size)]
    return pages


def _caller(graph: Graph, node: int) -> tuple[str, str]:
    """File and function that made a call; of a module its own name, so that it stands alone."""
    if graph.types[node] not in (API, API_COLLECTION):
        return graph.names[node], ""
    found = _LINE.search(source_of(graph.stacks[node]))
    return (found[1], found[2]) if found else ("", "")


def _fold(graph: Graph, parent: int, parts: Sequence[Sequence[int]], numbers: Counter[str], names: Sequence[str] = ()) -> dict[int, int]:
    """Make a collection of each group of more than one, under the names that are given; returns group -> collection."""
    made: dict[int, int] = {}
    row: list[int] = []
    for k, part in enumerate(parts):
        if len(part) < 2 or len(parts) < 2:
            row += part
            continue
        node = graph.add((names[k] if names else "") or _name(graph, part, numbers), API_COLLECTION, -1)
        graph.parents[node] = parent
        graph.micro_steps[node] = graph.micro_steps[part[0]]
        graph.children[node] = list(part)
        for one in part:
            graph.parents[one] = node
        made[k] = node
        row.append(node)
    graph.children[parent] = row
    return made


def _name(graph: Graph, part: Sequence[int], numbers: Counter[str]) -> str:
    callers = {_caller(graph, node) for node in part}
    file, function = callers.pop() if len(callers) == 1 else ("", "")
    name = re.split(r"[\\/]", file)[-1].removesuffix(".py").replace(".", "_")
    called = f"{name} {function.strip()}" if name else "Calls"
    numbers[called] += 1
    return f"{called}.{numbers[called] - 1}"
