"""Ranks of which both runs say the same are walked once (`formats.dump.replicas`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.formats.dump.dump_table import DumpTable

Key = tuple[int, ...]


class ReplicaWalks:
    """The walks of one step.

    Args:
        before: of the step before, by rank: ranks that parted then are not walked together.
    """

    def __init__(self, before: Mapping[int, DifferenceWalk]) -> None:
        self._before = before
        self._known: dict[Key, DifferenceWalk] = {}

    def known(self, rank: int, target: DumpTable, golden: DumpTable) -> DifferenceWalk | None:
        """The walk of an earlier rank that says the same, on both sides."""
        key = self._key(rank, target, golden)
        return None if key is None else self._known.get(key)

    def add(self, rank: int, target: DumpTable, golden: DumpTable, walker: DifferenceWalk) -> None:
        """The walk of a rank, for later ones."""
        key = self._key(rank, target, golden)
        if key is not None:
            self._known[key] = walker

    def _key(self, rank: int, target: DumpTable, golden: DumpTable) -> Key | None:
        if target.template is None or golden.template is None or target.named_ranks is not golden.named_ranks:
            return None  # other groups may be the difference
        return id(target.template), id(golden.template), id(self._before.get(rank))


def give_foreign(walkers: dict[int, DifferenceWalk], distances: Mapping[int, Mapping[int, float]]) -> None:
    """What other ranks put into the collectives of each; ranks that were walked together part where that is not the same."""
    known: dict[tuple[int, frozenset[tuple[int, float]]], DifferenceWalk] = {}
    taken: set[int] = set()
    for rank, walker in walkers.items():
        key = id(walker), frozenset((op, distance) for op, distance in distances[rank].items() if distance)
        if key not in known:
            known[key] = _part(walker) if id(walker) in taken else walker
            known[key].foreign = dict(distances[rank])
            taken.add(id(walker))
        walkers[rank] = known[key]


def _part(walker: DifferenceWalk) -> DifferenceWalk:
    """Another one of the same sides, with numbers of its own."""
    made = copy.copy(walker)
    made.measured, made.cancelled = copy.deepcopy((walker.measured, walker.cancelled))
    return made
