"""The suspects of one step: its origins in words, or what its records say beside numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from msprobe_engine.align.parallel.merge_records import origin_of
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.difference import call_facts, explain, layouts
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.difference.evidence import Precision
from msprobe_engine.find.difference.optimizer import not_updated
from msprobe_engine.find.difference.origin import MISSING, PRECISION, DifferenceOrigin
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.fold_suspects import MOST_SUSPECTS, firsts, stages_of
from msprobe_engine.formats.dump.dump_table import DumpTable

Look = Callable[[DifferenceWalk, int, int], list[Suspect]]
"""(walk, step, rank) -> what is seen there."""


def of_origins(step: int, found: Divergence) -> list[Suspect]:
    """Where differences begin, the most likely first. The first ones have words, and the first ones of those that are not the same."""
    suspects = [_of_origin(explain.place, step, found, number) for number in range(len(found.origins))]
    stages = stages_of({rank: walker.side for rank, walker in found.walkers.items()})
    for number in {*range(min(MOST_SUSPECTS, len(suspects))), *firsts(suspects, stages)[:MOST_SUSPECTS]}:
        suspects[number] = _of_origin(explain.suspect, step, found, number)
    return suspects


def _of_origin(put: Callable[[int, int, DifferenceOrigin, DifferenceWalk], Suspect], step: int, found: Divergence, number: int) -> Suspect:
    rank, origin = found.origins[number]
    return _placed(put(step, layouts.rank_of(found, rank, origin), origin, found.walkers[rank]), found, rank, origin)


def of_precision(step: int, found: Divergence, other: Precision) -> Suspect:
    """The first record of runs that are of different precision as a whole."""
    walker = found.walkers[other.rank]
    row, partner = walker.rows[other.at]
    op, golden = walker.side.op[row], walker.golden.side.op[partner]
    origin = DifferenceOrigin(op, golden, PRECISION, row, partner, 0.0, 0.0, 0.0)
    types = [one.removeprefix("torch.") for one in (other.target, other.golden)]
    return dataclasses.replace(
        explain.suspect(step, layouts.rank_of(found, other.rank, origin), origin, walker),
        why=other.sentence(),
        cause=Sentence("{0}, golden {1}", *types),
        distance=None,
        limit=None,
    )


def of_facts(step: int, found: Divergence) -> list[Suspect]:
    """Records that say something else beside numbers, by rank; what is cut in another way has other arguments, but for numbers such as a
    learning rate."""
    looks: list[Look] = [call_facts.differing, not_updated.no_update]
    looks += [] if found.wholes else [not_updated.differing]
    return [one for look in looks for one in _of_ranks(step, found, look)]


def _of_ranks(step: int, found: Divergence, look: Look) -> Iterator[Suspect]:
    """What is seen in each rank; in ranks that are walked together it is the same."""
    for rank, some in found.of_each(lambda walker: look(walker, step, 0)).items():
        yield from (dataclasses.replace(one, rank=rank) for one in some)


# Suspects of runs that were put together from stages and experts: named as in the dump of the rank they are on.
def _placed(suspect: Suspect, found: Divergence, rank: int, origin: DifferenceOrigin) -> Suspect:
    """The suspect with record, tensor and partner as they are called where they were dumped; `module` is the path in the whole model.

    Args:
        suspect: as `explain.suspect` made it; its rank is the one replica that is off, or the lowest rank.
        rank: of the walk.
    """
    walker = found.walkers[rank]
    target, golden = walker.side, walker.golden.side
    shown, op = (golden, origin.partner) if origin.kind == MISSING else (target, origin.op)
    here = origin_of(target, origin.op)
    return dataclasses.replace(
        suspect,
        record=_name(shown, op),
        rank=suspect.rank if here is None else here[0] + suspect.rank - rank,  # pipelines are cut alike, rank by rank
        partner=_name(golden, origin.partner) if origin.partner >= 0 else "",
        tensor=_row(target, origin.row) if origin.row >= 0 else "",
        why=suspect.why
        if _name(shown, op) == shown.ops[op]
        else Sentence("{0} ({1} in the order of the whole model)", suspect.why, shown.ops[op]),
    )


def _name(side: DumpTable, op: int) -> str:
    here = origin_of(side, op)
    return side.ops[op] if here is None else here[1]


def _row(side: DumpTable, row: int) -> str:
    op = side.op[row]
    return _name(side, op) + side.name[row][len(side.ops[op]) :]
