"""The suspects of one step: its origins in words, or what its records say beside numbers."""

from __future__ import annotations

from msprobe_engine.find.difference import call_facts, explain, layouts
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.difference.optimizer import not_updated
from msprobe_engine.find.difference.optimizer.placed_suspects import placed
from msprobe_engine.find.findings import Suspect

MOST_SUSPECTS = 20
"""So many are put into words."""


def of_origins(step: int, found: Divergence) -> list[Suspect]:
    """Where differences begin, the most likely first."""
    suspects = []
    for number, (rank, origin) in enumerate(found.origins):
        put = explain.suspect if number < MOST_SUSPECTS else explain.place
        one = put(step, layouts.rank_of(found, rank, origin), origin, found.walkers[rank])
        suspects.append(placed(one, found, rank, origin))
    return suspects


def of_facts(step: int, found: Divergence) -> list[Suspect]:
    """Records that say something else beside numbers, by rank; what is cut in another way has other arguments, but for numbers such as a
    learning rate."""
    alike = {rank: walker for rank, walker in found.walkers.items() if rank not in found.wholes}
    facts = [one for rank, walker in found.walkers.items() for one in call_facts.differing(walker, step, rank)]
    return facts + [one for rank, walker in alike.items() for one in not_updated.differing(walker, step, rank)]
