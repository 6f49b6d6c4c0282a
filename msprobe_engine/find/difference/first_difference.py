"""Where two runs begin to differ at all, by however little: a note where round-off explains it, the finding where every bit counts."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.difference import cross_rank, explain, layouts
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.difference.harmless import memory
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.origin import PARAMETER, RESULT, TAKEN, DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import OUTPUT, PARAMETERS, PARAMETERS_GRAD
from msprobe_engine.measure import distances, factorize, roundoff
from msprobe_engine.measure.segments import SegmentReduce


def of_step(step: int, divergence: Divergence) -> Suspect | None:
    """The first record of a step, over all ranks and in the order of execution, with a number that is not the same on both sides."""
    origins = {rank: [origin] for rank, origin in divergence.of_each(of_rank).items() if origin is not None}
    first = cross_rank.first_in_time(origins, divergence.links)
    if not first:
        return None
    rank, origin = first[0]
    return explain.suspect(step, layouts.rank_of(divergence, rank, origin), origin, divergence.walkers[rank])


def describe_first_difference(first: Suspect) -> Sentence:
    """As a note."""
    if first.module:
        template = "The runs begin to differ at step {0}, rank {1}, module {2}, {3}: {4}."
        return Sentence(template, first.step, first.rank, first.module, first.record, first.why)
    return Sentence("The runs begin to differ at step {0}, rank {1}, {2}: {3}.", first.step, first.rank, first.record, first.why)


def behind_unseen_update(first: Suspect, divergence: Divergence) -> list[str]:
    """That nobody can tell what has moved the parameters that differ first, in runs of one layout that record no calls of functions.

    Args:
        first: in a later step than the first one.
        divergence: the last step.
    """
    kinds = (kind for walker in divergence.different().walkers.values() for kind in walker.target.kinds)
    if first.kind != PARAMETER or divergence.wholes or any(len(kind) == 3 for kind in kinds):
        return []
    template = (
        "parameters differ from step {0} on, though all before was the same to the last bit: other settings of the optimizer or"
        " another kernel of it; at level mix its calls are recorded and tell"
    )
    return [Sentence(template, first.step)]


def behind_unseen_loss(first: Suspect, divergence: Divergence) -> list[str]:
    """That nobody can tell what has made another gradient of the same results, in runs of one layout that record no calls of functions:
    code around the modules (the loss) has no record, and is taken to round a few times. One that computes the same, from the same bits, in
    another way rounds its result once more.

    Args:
        first: where the runs begin to differ; all before is the same to the last bit.
        divergence: the last step.
    """
    kinds = (kind for walker in divergence.different().walkers.values() for kind in walker.target.kinds)
    numbers, golden = (first.numbers.get(side, {}) for side in ("target", "golden"))
    if first.kind != TAKEN or divergence.wholes or ".backward." not in first.record or any(len(kind) == 3 for kind in kinds):
        return []
    count, norm, unit = distances.elements(golden.get("shape")), golden.get("Norm"), roundoff.eps(golden.get("dtype")) / 2
    if not isinstance(norm, float) or not 0.0 < norm < math.inf or not unit or golden.get("dtype") != numbers.get("dtype"):
        return []
    allowed = roundoff.FORWARD * roundoff.fresh(unit) / math.sqrt(max(count, 1)) + roundoff.FLOOR
    of_norm = abs(numbers["Norm"] - norm) / norm
    of_mean = abs(numbers["Mean"] - golden["Mean"]) * math.sqrt(count) / norm
    if not max(of_norm, of_mean) > allowed:
        return []
    template = (
        "the gradient that comes out of the loss differs from step {0} on, though all before was the same to the last bit: another loss,"
        " or another way to compute it; at level mix its calls are recorded and tell"
    )
    return [Sentence(template, first.step)]


def begin_otherwise(first: Suspect, divergence: Divergence) -> list[str]:
    """That runs of one layout do not begin with the same weights: another rounding where they were loaded looks like weights that were
    changed by as much, and all that follows is held to the difference that these make. Statistics that differ by no
    more than their sums may do not tell of other weights.

    Args:
        first: in the first step.
        divergence: the last step.
    """
    if first.kind != PARAMETER or first.step or divergence.wholes or (first.distance is not None and first.distance <= roundoff.FLOOR):
        return []
    template = (
        "the runs do not begin with the same weights: {0}, {1}; rounding that they had where they were loaded may be as large, so that"
        " nothing smaller can be told from it; msprobe ckpt diff compares what was loaded"
    )
    return [Sentence(template, first.record, first.why)]


def of_rank(walker: DifferenceWalk) -> DifferenceOrigin | None:
    """The first record of a rank with a number that is not the same on both sides."""
    m = walker.measured
    differs = (m.distance > 0) & ~m.argument
    records = SegmentReduce(walker.starts).any(differs) & walker.counted
    for op, golden_op in (walker.structure.pairs[position] for position in walker.order[records[walker.order]].tolist()):
        different = [pair for pair in walker.span_of(op) if differs[pair] and not memory.is_destination(walker, walker.rows[pair][0])]
        if different:
            return _origin(walker, op, golden_op, np.array(different))
    return None


def _origin(walker: DifferenceWalk, op: int, golden_op: int, span: npt.NDArray[np.int64]) -> DifferenceOrigin:
    """Of a record whose pairs of rows `span` differ."""
    m = walker.measured
    role = np.frombuffer(bytes(walker.side.role), np.uint8)[factorize.columns(walker.rows)[0][span]]
    taken = ~np.isin(role, (OUTPUT, PARAMETERS_GRAD))
    shown = span[taken] if taken.any() else span
    pair = int(shown[np.argmax(m.distance[shown])])
    row, golden_row = walker.rows[pair]
    kind = RESULT if not taken.any() else PARAMETER if walker.side.role[row] == PARAMETERS or walker.is_parameter(row) else TAKEN
    origin = DifferenceOrigin(op, golden_op, kind, row, golden_row, float(m.distance[pair]), 0.0, 0.0)
    walker.blame_unmatched(origin)
    return origin
