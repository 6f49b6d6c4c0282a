"""Writes graphs as the json files of 8.1.1 (``*.vis``), one per rank and step, which the TensorBoard plugin ``tb-graph-ascend`` opens.

Fields: section 8.7 of the description of the existing tool, held to its own files by `tests/graph`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msprobe_engine.core import names
from msprobe_engine.core.io.output_files import WholeFile, guard_writing
from msprobe_engine.report.graph.existing import vis_texts
from msprobe_engine.report.graph.existing.items import items, saved_tensors
from msprobe_engine.report.graph.existing.vis_db import GOLDEN, TARGET, encode_link, outwards, partner_path
from msprobe_engine.report.graph.nodes.model import ROOT, ROOT_NAME, Comparison, Graph
from msprobe_engine.report.graph.writer import Plan


class VisJsonWriter:
    """A file for each graph that comes, under its name when all are there."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._made: list[WholeFile] = []

    def add(self, made: Graph | Comparison) -> None:
        """Write the next one.

        Raises:
            SinkError: it cannot be written.
        """
        path = self._plan.output / self._name(made)
        with guard_writing(path, "name another place"):
            whole = WholeFile(path)
            self._made.append(whole)
            with io.TextIOWrapper(whole.file, encoding="utf-8") as file:
                file.writelines(_document(made, self._plan))

    def finish(self) -> list[Path]:
        """Give the files their names.

        Raises:
            SinkError: they cannot be renamed.
        """
        for whole in self._made:
            with guard_writing(whole.path, "name another place"):
                whole.commit()
        return [whole.path for whole in self._made]

    def abort(self) -> None:
        for whole in self._made:
            whole.abort()
            with suppress(OSError):
                whole.path.unlink()

    def _name(self, made: Graph | Comparison) -> str:
        """With the numbers of step and rank where there are several of them, or the path is that of all steps or of all ranks."""
        steps, ranks = ({place[i] for place in self._plan.places} for i in range(2))
        given = Path(self._plan.target)
        below = {path.name for path in given.iterdir()} if given.is_dir() else set()
        several_steps = len(steps) > 1 or any(name.startswith("step") for name in below)
        words = [self._plan.word]
        words += [f"step{made.step}"] if several_steps else []
        words += [f"rank{made.rank}"] if several_steps or len(ranks) > 1 or any(name.startswith("rank") for name in below) else []
        return "_".join([*words, self._plan.stamp]) + ".vis"


def _document(made: Graph | Comparison, plan: Plan) -> Iterator[str]:
    """The text, node by node: a graph of many nodes as one object would take several times its file."""
    complete = plan.options.complete_stack
    if isinstance(made, Graph):
        yield "{"
        yield from _graph(TARGET, made, made, complete)
        rest: dict[str, Any] = {"MicroSteps": made.micro_step_count, "OverflowCheck": plan.options.overflow}
    else:
        for start, source, graph in (("{", TARGET, made.target), (",\n", GOLDEN, made.golden)):
            yield f"{start}{json.dumps(source)}: {{"
            yield from _graph(source, graph, made, complete)
            yield "}"
        rest = {
            "ToolTip": json.dumps(vis_texts.tool_tip(made.task)),
            "Colors": vis_texts.colours_811(made.task),
            "MicroSteps": made.target.micro_step_count,
            "task": made.task,
            "OverflowCheck": plan.options.overflow,
        }
    for key, value in rest.items():
        yield f",\n{json.dumps(key)}: {json.dumps(value)}"
    yield "}\n"


def _graph(source: str, graph: Graph, made: Graph | Comparison, complete: bool) -> Iterator[str]:
    yield f'"root": {json.dumps(ROOT_NAME)}, "dump_data_dir": {json.dumps(saved_tensors(graph))}, "node": {{'
    between = "\n"
    for node in outwards(graph):
        yield f"{between}{json.dumps(graph.names[node])}: {json.dumps(_node(source, graph, node, made, complete))}"
        between = ",\n"
    yield "}"


def _node(source: str, graph: Graph, node: int, made: Graph | Comparison, complete: bool) -> dict[str, Any]:
    compared = made if isinstance(made, Comparison) and source == TARGET else None
    given, results = items(graph, node, compared.metrics(node) if compared is not None else None, old=True)
    data: dict[str, Any] = {}
    if compared is not None and compared.index_811[node] is not None:
        data["precision_index"] = compared.index_811[node]
    if graph.overflow[node] is not None:
        data["overflow_level"] = graph.overflow[node]
    stack = graph.stacks[node]
    cells: dict[str, Any] = {
        "id": graph.names[node],
        "node_type": graph.types[node],
        "output_data": results,
        "input_data": given,
        "upnode": graph.names[graph.parents[node]] if node != ROOT else "None",
        "subnodes": [graph.names[one] for one in graph.children[node]],
        "matched_node_link": partner_path(made, source, node),
        "suggestions": {},
        "stack_info": list(stack if complete else stack_line(graph.names[node], stack)),
    }
    partner = made.golden_partners[node] if source == GOLDEN and isinstance(made, Comparison) else -1
    if graph.parents[node] == ROOT or (isinstance(made, Comparison) and partner >= 0 and made.target.parents[partner] == ROOT):
        cells["micro_step_id"] = graph.micro_steps[node]
    cells["data"] = data
    links = [encode_link(one) for one in graph.links.get(node, ())]
    if links:
        cells["matched_distributed"] = links if len(links) > 1 else links[0]
    return cells


# The one line of a call stack that 8.1.1 keeps of each node.
_RECORDER = ("api_template(", "api_registry.py")
"""In the line with which a dump of that version begins, where its own recorder calls the function."""


def stack_line(name: str, stack: Sequence[str]) -> tuple[str, ...]:
    """Of a module the innermost line that calls it (``self.fc1(x)``), of a function the line that calls it.

    Args:
        stack: its whole stack, innermost line first.

    Returns:
        One line; all lines when none of them says it, none of a node without a stack.
    """
    parsed = names.parse(name)
    if isinstance(parsed, names.ModuleName):
        call = f"{parsed.path.rpartition('.')[2]}("
        return next(((line,) for line in stack if call in line), tuple(stack))
    if isinstance(parsed, names.ApiName):
        for position, line in enumerate(stack[:-1]):
            if any(word in line for word in _RECORDER):
                return (stack[position + 1],)
    return tuple(stack)
