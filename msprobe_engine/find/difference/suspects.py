"""The suspects of one step: its origins in words, or what its records say beside numbers."""

from __future__ import annotations

from collections.abc import Callable

from msprobe_engine.find.difference import call_facts, explain, layouts
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.difference.optimizer import not_updated
from msprobe_engine.find.difference.optimizer.placed_suspects import placed
from msprobe_engine.find.difference.origin import DifferenceOrigin
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.fold_suspects import MOST_SUSPECTS, firsts, stages_of


def of_origins(step: int, found: Divergence) -> list[Suspect]:
    """Where differences begin, the most likely first. The first ones have words, and the first ones of those that are not the same."""
    suspects = [_of_origin(explain.place, step, found, number) for number in range(len(found.origins))]
    stages = stages_of({rank: walker.side for rank, walker in found.walkers.items()})
    for number in {*range(min(MOST_SUSPECTS, len(suspects))), *firsts(suspects, stages)[:MOST_SUSPECTS]}:
        suspects[number] = _of_origin(explain.suspect, step, found, number)
    return suspects


def _of_origin(put: Callable[[int, int, DifferenceOrigin, DifferenceWalk], Suspect], step: int, found: Divergence, number: int) -> Suspect:
    rank, origin = found.origins[number]
    return placed(put(step, layouts.rank_of(found, rank, origin), origin, found.walkers[rank]), found, rank, origin)


def of_facts(step: int, found: Divergence) -> list[Suspect]:
    """Records that say something else beside numbers, by rank; what is cut in another way has other arguments, but for numbers such as a
    learning rate."""
    alike = {rank: walker for rank, walker in found.walkers.items() if rank not in found.wholes}
    facts = [one for rank, walker in found.walkers.items() for one in call_facts.differing(walker, step, rank)]
    facts += [one for rank, walker in found.walkers.items() for one in not_updated.no_update(walker, step, rank)]
    return facts + [one for rank, walker in alike.items() for one in not_updated.differing(walker, step, rank)]
