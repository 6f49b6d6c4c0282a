"""Why a cell of our files may differ from the existing tool's: each rule is a sentence of
docs/reference/compatibility.md, "Graphs"."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from existing_graph import Case, Node, Pair

ITEMS = ("input_data", "output_data")
MESSAGES = ("send", "recv", "isend", "irecv")
SHIFTED = {"MeanRelativeErr": "Max", "NormRelativeErr": "Min"}
"""Fields of a row without a counterpart, and what 8.1.1 writes into them of dumps of MindSpore."""


class Difference(NamedTuple):
    """`column` is a field of the node, or of its row `row`; None where one side has no such node, row or field.

    Attributes:
        theirs_pair: their graphs of that step and rank.
        ranks: our graphs of that step; that of `rank` is the one with the difference.
    """

    theirs_pair: Pair
    ranks: dict[int, Pair]
    rank: int
    side: str
    node: str
    row: str
    column: str
    theirs: Any
    ours: Any

    def nodes(self) -> tuple[dict[str, Node], dict[str, Node]]:
        """All nodes of that side, theirs and ours."""
        pairs = self.theirs_pair, self.ranks[self.rank]
        return (pairs[0].npu, pairs[1].npu) if self.side == "NPU" else (pairs[0].bench, pairs[1].bench)

    def there(self) -> Node:
        """The node in their file."""
        return self.nodes()[0][self.node]

    def here(self) -> Node:
        """The node in our file."""
        return self.nodes()[1][self.node]

    def fields(self) -> dict[str, Any]:
        """The row in our file."""
        node = self.here()
        found: dict[str, Any] = {**node["input_data"], **node["output_data"]}[self.row]
        return found


def differences(theirs: Sequence[Pair], ours: Sequence[Pair]) -> tuple[int, list[Difference]]:
    """Number of cells that were compared, and those that differ. The order of nodes is that among the nodes that both have in the same
    place."""
    found: list[Difference] = []
    count = 0
    for one, other in zip(theirs, ours, strict=True):
        ranks = {pair.rank: pair for pair in ours if pair.step == other.step}
        for side, x, y in (("NPU", one.npu, other.npu), ("Bench", one.bench, other.bench)):
            renumber(y, side, one, other)
            both = [name for name in x if name in y and x[name]["up_node"] == y[name]["up_node"]]
            for nodes in (x, y):
                if any("node_order" in node for node in nodes.values()):
                    places = {name: place for place, name in enumerate(sorted(both, key=lambda name: nodes[name]["node_order"]))}
                    for name, node in nodes.items():
                        node["node_order"] = places.get(name)
            for name in [*x, *(name for name in y if name not in x)]:
                if name not in x or name not in y:
                    found.append(
                        Difference(one, ranks, other.rank, side, name, "", "node", x.get(name) and "there", y.get(name) and "there")
                    )
                    continue
                for row, column, mine, own in _node(x[name], y[name]):
                    count += 1
                    if mine != own and not (column in SUMS and _is_close(mine, own)):
                        found.append(Difference(one, ranks, other.rank, side, name, row, column, mine, own))
    return count, found


SUMS = ("EucDist", "Cosine")
"""The last bits of a sum in float64 depend on the processor."""


def _is_close(mine: Any, own: Any) -> bool:
    try:
        return math.isclose(float(mine), float(own), rel_tol=1e-13)
    except (TypeError, ValueError):
        return False


def renumber(nodes: dict[str, Node], side: str, theirs: Pair, ours: Pair) -> None:
    """Give our nodes the number of the step that the existing tool gives: 0 when a rank or a step directory was named."""
    if theirs.step == ours.step:
        return
    for node in nodes.values():
        if "step" in node:
            node["step"] = theirs.step
            for column in ("id", "graph_id", "stack_id"):
                node[column] = node[column].replace(f"{side}_{ours.step}_", f"{side}_{theirs.step}_", 1)


def _node(x: Node, y: Node) -> Iterator[tuple[str, str, Any, Any]]:
    for column, value in x.items():
        if column not in ITEMS:
            yield "", column, value, y.get(column)
            continue
        for row in [*value, *(row for row in y[column] if row not in value)]:
            mine, other = value.get(row), y[column].get(row)
            if mine is None or other is None or mine == {"value": "null"} != other:
                yield row, "row", mine, other
                continue
            for field in [*mine, *(field for field in other if field not in mine)]:
                yield row, field, mine.get(field), other.get(field)


def reason(case: Case, one: Difference) -> str:
    """The rule that a difference follows from; "" when there is none."""
    if one.column == "matched_distributed" and not one.theirs and _unlinked(case, one):
        return "link"
    if one.column == "row" and one.theirs == {"value": "null"} and (one.ours or {}).get("Max") == "null":
        return "empty"
    if one.column == "precision_index" and one.node.startswith("Apis_Between_Modules") and case.name.startswith("tensor"):
        return "collection"
    if ".parameters_grad" in one.node and one.ours is not None and (one.column == "node" or one.there()["matched_node_link"] == []):
        return "gradients"
    if one.column == "sub_nodes" and [name for name in one.ours if ".parameters_grad" not in name] == list(one.theirs or ()):
        return "gradients"
    if _accumulated(one):
        return "accumulated"
    if one.column == "micro_step_id" and _begun_by_autograd(one):
        return "micro step"
    if one.column in ("stack", "stack_id") and ".backward." in one.node and _of_another_call(one):
        return "stack"
    if one.column == "row" and "batch_isend_irecv" in one.node and case.version == "8.1.1":
        return "batch"
    if one.column == "dtype" and one.row.endswith((".src", ".dst")) and str(one.theirs) == f"<class {one.ours}>":
        return "rank"
    if one.column == "node_type" and one.node.startswith("Autograd."):
        return "autograd"
    if one.column in SHIFTED and one.ours == " " and one.theirs == one.fields().get(SHIFTED[one.column]) and case.framework == "mindspore":
        return "alone"
    if "-lm" in case.flags and _beside_clipping(one):
        return "clipping"
    return ""


def _unlinked(case: Case, one: Difference) -> bool:
    """The existing tool does not link this call: of the default group, a message whose ends do not look alike (8.1.1), a batch (26.2.0)."""
    call = one.node.split(".")[1]
    if call in MESSAGES:
        return case.version == "8.1.1" and _ends_differ(one)
    if call == "batch_isend_irecv":
        return case.version == "26.2.0"
    return not any("group_ranks" in item for item in one.here()["input_data"].values())


def _ends_differ(one: Difference) -> bool:
    """What the first output of both ends of a message holds is not the same, or NaN, which equals nothing."""
    name = f"{one.node}.output.0"
    ends = [one.here()["output_data"].get(name, {})]
    for rank, (_, other) in one.ours["nodes_info"].items():
        pair = one.ranks[int(rank)]
        node = (pair.npu if one.side == "NPU" else pair.bench)[other]
        ends.append(node["output_data"].get(f"{other}.output.0", {}))
    looks = {tuple(end.get(key) for key in ("dtype", "shape", "Max", "Min", "Mean", "Norm")) for end in ends}
    return len(looks) > 1 or "nan" in looks.pop()


def _accumulated(one: Difference) -> bool:
    """Gradients of a module's parameters are below its backward call with the highest number there, below the one made last here."""
    if one.column == "sub_nodes":
        kept = [[name for name in names or () if not _moved(one, name)] for names in (one.theirs, one.ours)]
        return kept[0] == kept[1]
    return one.column in ("up_node", "matched_node_link") and _moved(one, one.node)


def _moved(one: Difference, name: str) -> bool:
    theirs, ours = one.nodes()
    if ".parameters_grad" not in name or name not in theirs or name not in ours:
        return False
    return (theirs[name]["up_node"], ours[name]["up_node"]) == _highest_and_last(ours, name)


def _highest_and_last(nodes: dict[str, Node], gradients: str) -> tuple[str, str]:
    head = gradients.rpartition(".parameters_grad")[0] + ".backward."
    calls = [name for name in nodes if name.startswith(head)]
    highest = max(calls, key=lambda name: int(name.removeprefix(head)), default="")
    order = {name: place for place, name in enumerate(nodes)}
    return highest, max(calls, key=lambda name: (nodes[name].get("node_order") or 0, order[name]), default="")


def _begun_by_autograd(one: Difference) -> bool:
    """The forward call of an autograd function at the top, taken for a backward one, lets the next module begin a micro step there."""
    top = one.theirs_pair.npu["DefaultModel"]["sub_nodes"] or ()
    return any(name.startswith("Autograd.") and name.endswith(".forward") for name in top) and one.theirs > one.ours


def _of_another_call(one: Difference) -> bool:
    """Theirs is the stack of another forward call of the module than the one that it belongs to; ours is that of a call that was made."""
    path, _, _ = one.node.rpartition(".backward.")
    stacks = [[node[one.column] for name, node in nodes.items() if name.startswith(f"{path}.forward.")] for nodes in one.nodes()]
    return one.theirs in stacks[0] and one.ours in stacks[1] and one.ours in stacks[0]


def _beside_clipping(one: Difference) -> bool:
    """A call inside of ``clip_grad_norm_`` and one outside of it have changed places; so has the worst number of the collection."""
    displaced = _displaced(one)
    return one.node in displaced or (one.column == "precision_index" and not displaced.isdisjoint(one.here()["sub_nodes"] or ()))


def _displaced(one: Difference) -> set[str]:
    theirs, ours = one.nodes()
    links = {name: (theirs[name]["matched_node_link"], ours[name]["matched_node_link"]) for name in theirs.keys() & ours.keys()}
    return {
        name
        for name, (x, y) in links.items()
        if x != y and ".parameters_grad" not in name and "clip_grad" in {*x, *y, ours[name]["up_node"]}
    }
