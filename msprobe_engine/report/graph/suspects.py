"""Where the difference between two graphs begins, and how far their nodes are apart in multiples of round-off; both from the diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import Aligned, Structure
from msprobe_engine.align.frameworks.common_terms import CommonSide
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.difference import explain
from msprobe_engine.find.difference.divergence import Divergence, diverge
from msprobe_engine.find.difference.rank_walk import RankWalk, walk_rank
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.formats.dump.dump_table import OUTPUT, PARAMETERS_GRAD
from msprobe_engine.measure import factorize
from msprobe_engine.measure.segments import SegmentReduce
from msprobe_engine.report.graph.nodes.match import outside_in, standing_for
from msprobe_engine.report.graph.nodes.model import Graph
from msprobe_engine.report.graph.nodes.rows import Floats

"""Round-off of calls in which everything is an integer: none, so any difference is many units; not infinitely many, which says NaN."""


@dataclass
class Measured:
    """Attributes:
    units: float64 per target node: the largest difference of its results (gradients, of gradients) in multiples of what round-off
        explains in one call of its dtype and size (float64 where all are integers, which nothing rounds); NaN: nothing could be compared,
        inf: NaN or Inf on one side only, or another shape.
        Nodes without a record (collections, modules of which nothing was recorded, the root) have what is worst inside of them.
    suspect: target node where the difference begins, None without one.
    text: a sentence on it.
    begun: the walk through both sides, for a diagnosis over all ranks.
    """

    units: Floats
    suspect: int | None = None
    text: str = ""
    begun: RankWalk | None = None


def measure_graphs(target: Graph, golden: Graph, partners: Sequence[int], aligned: Aligned) -> Measured:
    """Measure two graphs.

    Args:
        partners: golden node of each target node, -1 for none.
        aligned: their records by structure; the search for the first difference goes by these.
    """
    target_side, golden_side = target.side, golden.side
    assert target_side is not None
    assert golden_side is not None
    begun = walk_rank(target_side, golden_side, aligned)
    units = np.full(len(target), np.nan)
    measured_nodes = _by_walker(units, target, golden, partners, begun.walker)
    rest = [node for node, other in enumerate(partners) if other >= 0 and node not in measured_nodes]
    _directly(units, target, golden, partners, rest)
    _containers(units, target)
    measured = _with_suspect(units, target, diverge({0: target_side}, {0: golden_side}, begun={0: begun}))
    measured.begun = begun
    return measured


def measured_by(target: Graph, golden: Graph, partners: Sequence[int], told: Divergence) -> Measured:
    """Measure two graphs whose divergence is known. `partners`: as it has the records beside each other."""
    units = np.full(len(target), np.nan)
    for walker in told.walkers.values():
        _by_walker(units, target, golden, partners, walker)
    _containers(units, target)
    return _with_suspect(units, target, told)


def _with_suspect(units: Floats, target: Graph, divergence: Divergence) -> Measured:
    if not divergence.origins:
        return Measured(units)
    rank, origin = divergence.origins[0]
    walker = divergence.walkers[rank]
    suspect = explain.suspect(target.step, target.rank, origin, walker)
    node = target.index.get(walker.side.ops[origin.op])
    where = Sentence(" ({0})", suspect.source) if suspect.source else ""
    return Measured(units, node, Sentence("{0}: {1}{2}", suspect.record, suspect.why, where))


def rows_in_common(walker: DifferenceWalk) -> dict[int, int]:
    """Row of the target's file -> row of the golden file, of two frameworks: rows that mean the same. What one side has as several tensors
    is not among them."""
    target_side, golden_side = walker.side, walker.golden.side
    if not isinstance(target_side, CommonSide) or not isinstance(golden_side, CommonSide):
        return {}
    pairs = ((target_side.rows_before[target_row], golden_side.rows_before[golden_row]) for target_row, golden_row in walker.rows)
    return {target_rows[0]: golden_rows[0] for target_rows, golden_rows in pairs if len(target_rows) == len(golden_rows) == 1}


def _by_walker(units: Floats, target: Graph, golden: Graph, partners: Sequence[int], walker: DifferenceWalk) -> set[int]:
    """Fill in nodes whose records the walk has beside each other; returns them."""
    filled: set[int] = set()
    for (target_record, golden_record), value in zip(walker.structure.pairs, _units(walker).tolist()):
        golden_nodes = standing_for(golden, walker.golden.side, golden_record)
        for node in standing_for(target, walker.side, target_record):
            if partners[node] in golden_nodes:
                units[node] = value
                filled.add(node)
    return filled


def _directly(units: Floats, target: Graph, golden: Graph, partners: Sequence[int], nodes: Sequence[int]) -> None:
    """Fill in nodes that are beside others than the structure says."""
    target_side, golden_side = target.side, golden.side
    assert target_side is not None
    assert golden_side is not None
    pairs = [((target.records[node], golden.records[partners[node]]), node) for node in nodes]
    pairs = [(pair, node) for pair, node in pairs if min(pair) >= 0]
    if pairs:
        walker = DifferenceWalk(Tree(target_side), Tree(golden_side), Structure([pair for pair, _ in pairs]))
        unit_of_pair = dict(zip(walker.structure.pairs, _units(walker).tolist()))  # pieces of flat buffers are no pairs
        for pair, node in pairs:
            units[node] = unit_of_pair.get(pair, units[node])


def _containers(units: Floats, target: Graph) -> None:
    """Nodes without a record of their own have what is worst inside of them."""
    for node in reversed(list(outside_in(target))):
        if target.records[node] < 0 and target.children[node]:
            units[node] = np.fmax.reduce(units[target.children[node]])


def _units(walker: DifferenceWalk) -> Floats:
    """float64, one per pair of records."""
    m, rows = walker.measured, factorize.columns(walker.rows)[0]
    role = np.frombuffer(bytes(walker.side.role), np.uint8)[rows]
    out = (role == OUTPUT) | (role == PARAMETERS_GRAD)
    sums = SegmentReduce(walker.starts)
    units = sums.largest(np.where(out & m.compared, np.array(walker.carried.alone), 0.0))
    units[~sums.any(out & m.compared)] = np.nan
    return units
