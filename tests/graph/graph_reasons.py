"""Why a cell of our files may differ from the existing tool's: each rule is a sentence of docs/graph.md, "Against the existing tool"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from existing_graph import Case, Node, Outcome, Pair

ITEMS = ("input_data", "output_data")
PLACES = ("id", "graph_id", "stack_id", "step", "rank")


class Difference(NamedTuple):
    """`column` is a field of the node, or of its row `row`; None where one side has no such node, row or field."""

    side: str
    node: str
    row: str
    column: str
    theirs: Any
    ours: Any


def differences(theirs: Outcome, ours: Outcome) -> tuple[int, list[Difference]]:
    """Number of cells that were compared, and those that differ."""
    found: list[Difference] = []
    count = 0
    for one, other in zip(theirs.pairs, ours.pairs, strict=True):
        for side, x, y in (("NPU", one.npu, other.npu), ("Bench", one.bench, other.bench)):
            renumber(y, side, one, other)
            for name in [*x, *(name for name in y if name not in x)]:
                if name not in x or name not in y:
                    found.append(Difference(side, name, "", "node", x.get(name) and "there", y.get(name) and "there"))
                    continue
                for difference in _node(side, name, x[name], y[name]):
                    count += 1
                    if difference.theirs != difference.ours:
                        found.append(difference)
    return count, found


def renumber(nodes: dict[str, Node], side: str, theirs: Pair, ours: Pair) -> None:
    """Give our nodes the number of the step that the existing tool gives: 0 when a rank or a step directory was named."""
    if theirs.step == ours.step:
        return
    for node in nodes.values():
        if "step" in node:
            node["step"] = theirs.step
            for column in ("id", "graph_id", "stack_id"):
                node[column] = node[column].replace(f"{side}_{ours.step}_", f"{side}_{theirs.step}_", 1)


def _node(side: str, name: str, x: Node, y: Node) -> Iterator[Difference]:
    for column, value in x.items():
        if column not in ITEMS:
            yield Difference(side, name, "", column, value, y.get(column))
            continue
        for row in [*value, *(row for row in y[column] if row not in value)]:
            mine, other = value.get(row), y[column].get(row)
            if mine is None or other is None or mine == {"value": "null"} != other:
                yield Difference(side, name, row, "row", mine, other)
                continue
            for field in [*mine, *(field for field in other if field not in mine)]:
                yield Difference(side, name, row, field, mine.get(field), other.get(field))


def reason(case: Case, one: Difference, ours: Outcome) -> str:
    """The rule that a difference follows from; "" when there is none."""
    if one.column == "matched_distributed" and not one.theirs:
        return "link"
    if one.column == "row" and one.theirs == {"value": "null"} and (one.ours or {}).get("Max") == "null":
        return "empty"
    if one.column == "precision_index" and one.node.startswith("Apis_Between_Modules") and case.name.startswith("tensor"):
        return "collection"
    if ".parameters_grad" in one.node and one.column in ("node", "matched_node_link") and one.ours:
        return "gradients"
    if one.column == "sub_nodes" and [name for name in one.ours if ".parameters_grad" not in name] == list(one.theirs or ()):
        return "gradients"
    if one.column == "node_order" and ".parameters_grad" in str(list(ours.pairs[0].npu) + list(ours.pairs[0].bench)):
        return "gradients"
    if one.column in ("stack", "stack_id") and ".backward." in one.node and "recompute" in case.name:
        return "stack"
    if one.column == "row" and "batch_isend_irecv" in one.node and case.version == "8.1.1":
        return "batch"
    if one.column == "dtype" and one.row.endswith((".src", ".dst")) and str(one.theirs) == f"<class {one.ours}>":
        return "rank"
    if one.column == "node_type" and one.node.startswith("Autograd."):
        return "autograd"
    return ""
