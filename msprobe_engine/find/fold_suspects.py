"""Suspects that are the same on several ranks as one, with the ranks that it is on: what differs is named before copies of it.

The same are places of one step in records of one name and one stage of the pipeline, whose calls are numbered alike, with what stands
against them on the golden side. How much they differ may be another number on each rank: the first rank's is said.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from msprobe_engine.core.text.ranges import ranges_of
from msprobe_engine.find.findings import Suspect
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.world import parallel_of

MOST_SUSPECTS = 20
"""So many are put into words."""


def stages_of(sides: Mapping[int, DumpTable]) -> dict[int, int]:
    """Rank -> stage of its pipeline, of those that say one. Stages number their layers alike, each from its first one."""
    places = {rank: parallel_of(side.header, "rank") for rank, side in sides.items()}
    return {rank: place["pp"] for rank, place in places.items() if "pp" in place}


def firsts(places: Sequence[Suspect], stages: Mapping[int, int]) -> list[int]:
    """Indices of those that are the first of their kind."""
    seen: dict[Hashable, int] = {}
    for number, suspect in enumerate(places):
        seen.setdefault(_key(suspect, stages), number)
    return list(seen.values())


def fold(places: Sequence[Suspect], stages: Mapping[int, int]) -> list[Suspect]:
    """The first suspects of each kind, at most `MOST_SUSPECTS`, in the order of `places`; each gets all of its ranks."""
    groups: dict[Hashable, list[Suspect]] = {}
    for suspect in places:
        groups.setdefault(_key(suspect, stages), []).append(suspect)
    suspects = []
    for same in list(groups.values())[:MOST_SUSPECTS]:
        ranks = sorted({rank for suspect in same for rank in suspect.ranks or [suspect.rank]})
        same[0].on_ranks = ranges_of(ranks) if len(same) > 1 and len(ranks) > 1 else []
        suspects.append(same[0])
    return suspects


def _key(suspect: Suspect, stages: Mapping[int, int]) -> Hashable:
    said = "" if suspect.distance is not None else suspect.why  # without a distance the sentence holds what differs
    return suspect.step, suspect.record, suspect.kind, suspect.tensor, suspect.partner, stages.get(suspect.rank), tuple(suspect.ranks), said
