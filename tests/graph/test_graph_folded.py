"""Long rows of calls are folded on the page, and on the page alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from msprobe_engine.report.graph.nodes.model import API, API_COLLECTION, Comparison, Graph
from msprobe_engine.report.graph.page import folded

LINE = "File /site-packages/torch/nn/functional.py, line 1, in linear, \n x", "File /job/{0}.py, line 7, in forward, \n x = self.fc(x)"


def row(count: int, callers: tuple[str, ...] = (), each: int = 10) -> Graph:
    """Calls below the root, so many in turn by each caller."""
    graph = Graph(0, 0, None)
    stacks = [tuple(line.format(name) for line in LINE) for name in callers]
    for i in range(count):
        graph.add(f"Functional.linear.{i}.forward", API, 0, stack=stacks[i // each % len(stacks)] if stacks else ())
    return graph


def leaves(graph: Graph, node: int = 0) -> list[int]:
    """Calls below a node, in order of execution."""
    inside = graph.children[node]
    return [leaf for one in inside for leaf in leaves(graph, one)] if inside else [node]


def test_calls_of_one_function_are_put_together() -> None:
    """Calls that follow each other and that one function of the program made are a collection under its name; the graph stays."""
    graph = row(400, ("attention", "mlp"))
    made = folded.fold_long_rows(graph)
    assert [made.names[node] for node in made.children[0]][:3] == ["attention forward.0", "mlp forward.0", "attention forward.1"]
    assert len(made.children[0]) == 40
    assert leaves(made) == leaves(graph) == list(range(1, 401))
    assert len(graph) == 401
    assert all(made.parents[one] == node for node in range(401, len(made)) for one in made.children[node])


def test_no_row_is_long() -> None:
    """Without stacks, some tens of calls are together, and of tens of thousands collections are too; short rows stay."""
    assert folded.fold_long_rows(row(90)).children[0] == list(range(1, 91))
    for count, callers in ((3000, ()), (30_000, ()), (5000, ("train",))):
        made = folded.fold_long_rows(row(count, callers))
        assert max(map(len, made.children)) <= 175
        assert leaves(made) == list(range(1, count + 1))
        assert len(set(made.names)) == len(made)


def test_partners_are_in_collections_that_are_partners() -> None:
    """The golden run makes one call more in the middle: each collection has its partner, with the worst of what is in it."""
    target, golden = row(300), row(301)
    partners = [0, *range(1, 101), *range(102, 302)]
    back = [-1] * 302
    for node, other in enumerate(partners):
        back[other] = node
    units = np.full(301, 0.5)
    units[150] = 77.0
    shown = Comparison(target, golden, "summary", partners, back, [0.0] * 301, units, suspect=150)
    made = folded.both_folded(shown)
    groups = made.target.children[0]
    assert [made.target.types[node] for node in groups] == [API_COLLECTION] * 6
    assert [made.partners[node] for node in groups] == made.golden.children[0]
    for node in groups:
        inside = [made.partners[one] for one in made.target.children[node]]
        assert [one for one in made.golden.children[made.partners[node]] if one != 101] == inside
        assert made.golden_partners[made.partners[node]] == node
    assert [float(made.units[node]) for node in groups] == [0.5, 0.5, 77.0, 0.5, 0.5, 0.5]
    assert made.metrics(groups[0]) == {}
    assert len(shown.target) == 301
    assert shown.partners is partners
    assert len(partners) == 301


def test_the_page_shows_the_collections(tmp_path: Path) -> None:
    """What is written for the browser has more nodes than the graph, and the suspect keeps its name."""
    from msprobe_engine.report.graph.page.page import PageWriter

    writer = PageWriter(tmp_path / "graph.html", "t", "a")
    graph = row(400, ("attention", "mlp"))
    graph.suspect = 150
    writer.add(graph)
    assert writer._pairs[0]["nodes"] == [441]
    assert writer._pairs[0]["suspectName"] == "Functional.linear.149.forward"
    writer.finish()
    assert len(graph) == 401
