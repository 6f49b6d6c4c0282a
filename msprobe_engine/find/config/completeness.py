"""What is missing of a pack of this tool: the one place that all commands ask, so that what was taken away is never "no difference".

A pack says itself what belongs in it: its ``meta.json`` how many ranks the job has, the list of what was withheld how many variables there
are, and its other entries which parts were collected. Packs of the existing tool say nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msprobe_engine.core.text.ranges import listed
from msprobe_engine.find.config.difference import SIDES
from msprobe_engine.formats.pack import entries

if TYPE_CHECKING:
    from msprobe_engine.find.config.pack_settings import PackSide

_META = ("format", "framework", "rank", "world_size", "created", "run")
_OF_RANKS = ("ranks", "env", "withheld", "system")
"""Parts that every rank writes."""
_WITH_COUNTS = 2
"""The format from which on a pack says what was withheld, and how many variables there are."""
_MOST = 8
_EMPTY = 4
"""Bytes of an entry that holds nothing: ``{}``, ``[]``, ``null``."""


def missing_of(side: PackSide) -> list[str]:
    """Sentences about entries that a pack of this tool must have and has not, or that are empty; none of a pack of the existing tool."""
    pack = side.pack
    if not any(name.startswith("msprobe/") for name in pack.names):
        return []
    found: list[str] = []
    if entries.META not in pack:
        found.append(f"there is no entry {entries.META}, so what else is missing cannot be told")
    elif lacking := [key for key in _META if key not in side.meta]:
        found.append(f"{entries.META} has no {', '.join(lacking)}")
    counted = _format(side) >= _WITH_COUNTS
    ranks = set(pack.ranks)
    for part in _OF_RANKS:
        wanted = ranks if side.world_size is not None else {0} & ranks
        if part == "withheld" and not counted:
            continue
        if part == "env" and side.world_size is None:  # of the command line: the entry of the existing tool
            wanted = set()
        if absent := sorted(wanted - pack.by_rank(part).keys()):
            found.append(f"there is no entry of {part} of rank {listed(absent)}")
    needed = [entries.ENV, entries.PIP] if 0 in ranks else []
    needed += [entries.DYNAMIC] if 0 in pack.by_rank("hyperparameters") else []
    needed += [entries.STATIC_SETTINGS] if entries.STATIC in pack else []
    found += [f"there is no entry {name}" for name in needed if name not in pack]
    if entries.PIP in pack and not side.packages():
        found.append(f"{entries.PIP} names no package")
    found += [f"the entry {name} is empty" for name in _never_empty(side) if pack.size(name) <= _EMPTY]
    found += [sentence for rank, name in pack.by_rank("withheld").items() if counted for sentence in _counts(side, rank, name)]
    return found[:_MOST] + ([f"and {len(found) - _MOST} more things are missing"] if len(found) > _MOST else [])


def of_one_side(bench: PackSide, cmp: PackSide) -> list[str]:
    """Sentences about entries, or parts of them, that one of two packs has alone. Only packs of this tool that
    were made in the same way have the same entries; ranks of which one pack has nothing are said elsewhere."""
    if not (bench.pack.ours and cmp.pack.ours) or (bench.world_size is None) != (cmp.world_size is None):
        return []
    found: list[str] = []
    ranks = set(bench.pack.ranks) & set(cmp.pack.ranks)
    for who, side, other in (("bench", bench, cmp), ("cmp", cmp, bench)):
        only = [name for name in side.pack.names if name not in other.pack and _is_compared(name, ranks, other)]
        if only:
            more = f" and {len(only) - _MOST} more" if len(only) > _MOST else ""
            found.append(f"only the {SIDES[who]} pack has {', '.join(only[:_MOST])}{more}, so what is in there is not compared")
        found += [f"only in the {SIDES[who]} pack something is in {name}" for name in _emptied(side, other)]
        for part in ("system", "random"):  # of ranks only those that there are: a launcher tells where they run
            if parts := _parts_of_one_side(side, other, part):
                more = f" and {len(parts) - _MOST} more" if len(parts) > _MOST else ""
                found.append(f"only the {SIDES[who]} pack has {', '.join(parts[:_MOST])}{more} of {part}, so this is not compared")
    return found


def _format(side: PackSide) -> int:
    number = side.meta.get("format")
    return number if isinstance(number, int) else 1


def _never_empty(side: PackSide) -> Iterator[str]:
    for part in ("ranks", "system", "hyperparameters"):
        yield from side.pack.by_rank(part).values()
    yield from (name for name in (entries.META, entries.STATIC_SETTINGS) if name in side.pack)
    for part in ("weights", "dataset"):
        yield from side.pack.by_step(part).values()


def _counts(side: PackSide, rank: int, name: str) -> Iterator[str]:
    """The list of what was withheld says how long it is, and how many values stand beside it."""
    entry = side.mapping(name)
    if not all(isinstance(entry.get(key), kind) for key, kind in (("variables", dict), ("key_id", str), ("values", int), ("names", int))):
        yield f"{name} does not say what was withheld"
        return
    if len(entry["variables"]) != entry["names"]:
        yield f"{name} names {len(entry['variables'])} variables, and {entry['names']} were withheld"
    where = side.pack.by_rank("env").get(rank, entries.ENV)
    for place in dict.fromkeys((where, entries.ENV) if rank == 0 else (where,)):
        if place in side.pack and len(side.mapping(place)) != entry["values"]:
            yield f"{place} has the values of {len(side.mapping(place))} variables, and {entry['values']} were collected"


def _is_compared(name: str, ranks: set[int], other: PackSide) -> bool:
    """Whether the other pack should have it, too: not of a rank that it does not have, and no list that it is too old for."""
    of_rank, of_step = entries.ranks_of(name), entries.steps_of(name) or entries.existing_of(name)
    if of_rank is not None and of_rank[0] == "withheld" and _format(other) < _WITH_COUNTS:
        return False
    rank = of_rank[1] if of_rank is not None else of_step[2] if of_step is not None else None
    return rank is None or rank in ranks


def _emptied(side: PackSide, other: PackSide) -> list[str]:
    """Entries that are empty on the other side alone."""
    both = (name for name in side.pack.names if name in other.pack)
    return [name for name in both if other.pack.size(name) <= _EMPTY < side.pack.size(name)][:_MOST]


def _parts_of_one_side(side: PackSide, other: PackSide, part: str) -> list[str]:
    """Names of what an entry of `part` holds, one level deep, and of random states two, where the other pack has nothing of it."""
    mine, theirs = side.pack.by_rank(part), other.pack.by_rank(part)
    found = set()
    for rank in mine.keys() & theirs.keys():
        a, b = side.mapping(mine[rank]), other.mapping(theirs[rank])
        found |= {name for name, value in a.items() if value not in ({}, [], None) and b.get(name) in ({}, [], None)}
        if part == "random":
            states, others = a.get("states"), b.get("states")
            if isinstance(states, dict) and isinstance(others, dict):
                found |= {f"states.{name}" for name in states if name not in others}
    return sorted(found)
