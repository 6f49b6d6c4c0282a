"""Which nodes of two graphs belong together.

By the rules of the existing tool: the same name below the same names (8.1.1: and the same kinds and shapes of arguments and results);
fuzzy: modules by their names, and the calls of functions inside of each by name without their number, in order; with a layer mapping what
the mapping says, and the same name else.

One call more on one side shifts the numbers of all that follow, and these rules then put calls beside each other that are others. Where
they leave nodes over, the records are matched by structure (`align.calls.structure`) unless that is not wanted, and what it says counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from msprobe_engine.align.calls.structure import Aligned
from msprobe_engine.align.frameworks.common_terms import CommonSide
from msprobe_engine.align.mapping.layer import partners_by_layer
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure import factorize
from msprobe_engine.measure.factorize import Bools
from msprobe_engine.report.graph.nodes.model import API, ROOT, Graph
from msprobe_engine.report.graph.nodes.rows import result_rows
from msprobe_engine.report.graph.options import GraphOptions

_NUMBER = re.compile(r"\.\d+\.")
_RANK = re.compile(r"_rank\d+")


@dataclass
class Matched:
    """Attributes:
    partners: golden node of each target node, -1 for none; several may have the same one (a layer mapping).
    golden_partners: target node of each golden node, -1; of several the last, level by level.
    by_structure: target nodes whose partner the rules of the existing tool do not give.
    """

    partners: list[int]
    golden_partners: list[int]
    by_structure: set[int] = field(default_factory=set)


def match(target: Graph, golden: Graph, options: GraphOptions, aligned: Callable[[], Aligned] | None = None) -> Matched:
    """Match the nodes of two graphs.

    Args:
        options: `fuzzy`, `layer_mapping`, `match` and `generation` count.
        aligned: gives which records belong together by structure; asked only when it is needed.

    Raises:
        UsageError: the layer mapping is none, or a side has no construct.json.
    """
    mapped = options.layer_mapping is not None and options.layer_mapping is not False
    if options.fuzzy:
        if mapped:
            target.problems.append(
                Sentence("fuzzy matching and a layer mapping were asked for: nodes are matched fuzzily, as in the existing tool")
            )
        partners = _fuzzy(target, golden, options.old)
    elif mapped:
        said: dict[str, str] = {}
        if target.side is not None and golden.side is not None:
            others = partners_by_layer(target.side, golden.side, options.layer_mapping)
            said = {name: golden.side.ops[other] if other >= 0 else "" for name, other in zip(target.side.ops, others)}
        partners = [golden.index.get(said.get(name, name), -1) for name in target.names]
    else:
        partners = _by_name(target, golden, options.old)
    matched = Matched(partners, _invert_partners(target, golden, partners))
    if options.match == "structure" and aligned is not None and _left_over(target, golden, matched):
        _complete(target, golden, matched, aligned())
    return matched


def match_told(target: Graph, golden: Graph, pairs: Iterable[tuple[int, int]]) -> Matched:
    """Match the nodes of two graphs whose records are known to belong together.

    Args:
        pairs: (record of the target, record of the golden side).
    """
    partners = [-1] * len(target)
    partners[ROOT] = ROOT
    for target_record, golden_record in pairs:
        node, other = target.node_of_record[target_record], golden.node_of_record[golden_record]
        if node >= 0 and other >= 0:
            partners[node] = other
    _without_records(target, golden, partners)
    return Matched(partners, _invert_partners(target, golden, partners))


def _invert_partners(target: Graph, golden: Graph, partners: list[int]) -> list[int]:
    """Target node of each golden node, -1; of several the last, level by level."""
    found = [-1] * len(golden)
    for node in outside_in(target):
        if partners[node] >= 0:
            found[partners[node]] = node
    return found


def outside_in(graph: Graph) -> Iterator[int]:
    """All nodes, level by level from the root."""
    level = [ROOT]
    while level:
        yield from level
        level = [child for node in level for child in graph.children[node]]


def _by_name(target: Graph, golden: Graph, old: bool) -> list[int]:
    """The same name below the same names."""
    partners = [-1] * len(target)
    index, names, parents = golden.index, golden.names, golden.parents
    for node in outside_in(target):
        other = index.get(target.names[node], -1)
        if other < 0:
            continue
        above, beside = target.parents[node], parents[other]
        if above < 0 or beside < 0:
            alike = above < 0 and beside < 0
        else:
            alike = partners[above] == beside and names[beside] == target.names[above]
        if alike:
            partners[node] = other
    if old:  # what encloses a node may itself have other arguments, so these are looked at last
        unlike = ~_alike(target, golden, partners, kinds=True)
        for node in np.flatnonzero(unlike).tolist():
            partners[node] = -1
    return partners


def _fuzzy(target: Graph, golden: Graph, old: bool) -> list[int]:
    partners = [-1] * len(target)
    calls = [-1] * len(target)
    for node in range(len(target)):
        if target.types[node] != API:
            partners[node] = golden.index.get(target.names[node], -1)
            if partners[node] >= 0:
                counted = dict(_number_calls(golden, partners[node]))
                for key, call in _number_calls(target, node):
                    calls[call] = counted.get(key, -1)
    if old:
        for some in (partners, calls):
            for node in np.flatnonzero(~_alike(target, golden, some, kinds=False)).tolist():
                some[node] = -1
    for node, other in enumerate(calls):
        if other >= 0 and partners[target.parents[node]] >= 0:
            partners[node] = other
    return partners


def _number_calls(graph: Graph, node: int) -> Iterator[tuple[tuple[str, int], int]]:
    """Calls of functions right inside of a node: (name without numbers and ranks, the how manieth of that name), and the node."""
    counts: Counter[str] = Counter()
    for child in graph.children[node]:
        if graph.types[child] == API:
            name = _RANK.sub("", _NUMBER.sub(".", graph.names[child]))
            counts[name] += 1
            yield (name, counts[name]), child


def _alike(target: Graph, golden: Graph, partners: list[int], kinds: bool) -> Bools:
    alike = np.ones(len(target), bool)
    target_side, golden_side = target.side, golden.side
    if target_side is None or golden_side is None:
        return alike
    golden_nodes = np.asarray(partners, np.int64)
    nodes = np.flatnonzero(golden_nodes >= 0)
    target_records = np.asarray(target.records, np.int64)[nodes]
    golden_records = np.asarray(golden.records, np.int64)[golden_nodes[nodes]]
    results = result_rows(target_side), result_rows(golden_side)
    known: dict[object, int] = {}
    words = _words(target_side, kinds, known), _words(golden_side, kinds, known)
    for role in (False, True):
        rows, begins, counts = zip(*(_of_role(side, is_result == role) for side, is_result in zip((target_side, golden_side), results)))
        many = np.append(counts[0], 0)[target_records], np.append(counts[1], 0)[golden_records]  # -1 takes the last one
        if kinds:
            alike[nodes[many[0] != many[1]]] = False
        counts_in_common = np.minimum(*many)
        target_rows = rows[0][factorize.spread(np.append(begins[0], 0)[target_records], counts_in_common)]
        golden_rows = rows[1][factorize.spread(np.append(begins[1], 0)[golden_records], counts_in_common)]
        off = words[0][target_rows] != words[1][golden_rows]
        alike[np.repeat(nodes, counts_in_common)[off]] = False
    return alike


def _of_role(side: DumpTable, chosen: Bools) -> tuple[factorize.Integers, factorize.Integers, factorize.Integers]:
    """Chosen rows; where those of each record begin among them, and how many they are."""
    rows = np.flatnonzero(chosen)
    counts = np.bincount(np.array(side.op, np.int64)[rows], minlength=len(side.ops))
    return rows, np.cumsum(counts) - counts, counts


def _words(side: DumpTable, kinds: bool, known: dict[object, int]) -> factorize.Integers:
    """int64 (rows,): a number per shape, and per kind of what is no tensor; `known` is shared by the sides."""
    shapes = factorize.of_each(side.shape, lambda shape: known.setdefault((type(shape) is list, str(shape)), len(known)), np.int64)
    if not kinds or not len(side):
        return shapes
    dtypes = factorize.of_each(side.dtype, lambda dtype: known.setdefault(dtype, len(known)), np.int64)
    tensors = ~factorize.mask(side.values, len(side)) & factorize.of_each(side.dtype, lambda dtype: dtype is not None, bool)
    return np.asarray(shapes * (1 << 31) + np.where(tensors, -1, dtypes))


def _left_over(target: Graph, golden: Graph, found: Matched) -> bool:
    """A node with a record has no partner."""
    pairs = ((target.records, found.partners), (golden.records, found.golden_partners))
    return any(record >= 0 and other < 0 for records, partners in pairs for record, other in zip(records, partners))


def _complete(target: Graph, golden: Graph, found: Matched, aligned: Aligned) -> None:
    """Let the structure say which records belong together; nodes it says nothing about keep their partner while nobody else has it."""
    before = list(found.partners)
    said, turned = _pair_by_records(target, golden, aligned)
    taken = set(said.values())
    partners = [said.get(node, other if other not in taken else -1) for node, other in enumerate(before)]
    _without_records(target, golden, partners)
    found.partners = partners
    found.golden_partners = _invert_partners(target, golden, partners)
    for other, node in turned.items():
        found.golden_partners[other] = node
    found.by_structure = {node for node, other in enumerate(partners) if other >= 0 and other != before[node]}


def _pair_by_records(target: Graph, golden: Graph, aligned: Aligned) -> tuple[dict[int, int], dict[int, int]]:
    """Target node -> golden node, and golden node -> target node, by the records. Where several records stand for one (two frameworks),
    each of them is beside the one whose name they have together."""
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    target_side, golden_side = aligned.target.side, aligned.golden.side
    for target_record, golden_record in aligned.structure.pairs:
        target_nodes, golden_nodes = standing_for(target, target_side, target_record), standing_for(golden, golden_side, golden_record)
        if target_nodes and golden_nodes:
            forward.update(dict.fromkeys(target_nodes, golden.index.get(golden_side.ops[golden_record], golden_nodes[0])))
            backward.update(dict.fromkeys(golden_nodes, target.index.get(target_side.ops[target_record], target_nodes[0])))
    return forward, backward


def needless(target: Graph, golden: Graph, found: Matched, aligned: Aligned) -> tuple[set[int], set[int]]:
    """Nodes of both graphs without a partner that need none (`Comparison.needless`)."""
    sides = (target, aligned.target.side, found.partners), (golden, aligned.golden.side, found.golden_partners)
    quiet = [
        {node for op in side.quiet for node in standing_for(graph, side, op) if partners[node] < 0}
        if isinstance(side, CommonSide)
        else set()
        for graph, side, partners in sides
    ]
    return quiet[0], quiet[1]


def standing_for(graph: Graph, side: DumpTable, op: int) -> tuple[int, ...]:
    """Nodes of the records that a record stands for; of a side that is no other than the graph's its own."""
    if side is graph.side:
        node = graph.node_of_record[op]
        return (node,) if node >= 0 else ()
    names = [side.ops[op]]
    if isinstance(side, CommonSide) and graph.side is not None:
        names = [graph.side.ops[member] for member in side.members[op]]
    return tuple(graph.index[name] for name in names if name in graph.index)


def _without_records(target: Graph, golden: Graph, partners: list[int]) -> None:
    """Collections, and modules of which nothing was recorded: beside what most of their children are in, innermost first; those of whose
    children nothing is known keep what they are beside, while nobody else is."""
    bare = [node for node in outside_in(target) if target.records[node] < 0 and node != ROOT]
    taken = {other for node, other in enumerate(partners) if other >= 0 and target.records[node] >= 0}
    before = {node: partners[node] for node in bare}
    for node in bare:
        partners[node] = -1
    for node in reversed(bare):
        votes = Counter(
            above
            for child in target.children[node]
            if (other := partners[child]) >= 0
            and (above := golden.parents[other]) > ROOT
            and golden.types[above] == target.types[node]
            and above not in taken
        )
        if votes:
            partners[node] = votes.most_common(1)[0][0]
            taken.add(partners[node])
    for node in bare:
        if partners[node] < 0 <= before[node] and before[node] not in taken:
            partners[node] = before[node]
            taken.add(before[node])
