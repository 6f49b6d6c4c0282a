"""What is missing of a pack of this tool: the one place that all commands ask, so that what was taken away is never "no difference".

A pack says itself what belongs in it: its ``meta.json`` how many ranks the job has, the list of what was withheld how many variables there
are, and its other entries which parts were collected. Packs of the existing tool say nothing of the kind.
"""

from __future__ import annotations

from msprobe_engine.find.config.difference import SIDES
from msprobe_engine.find.config.pack_settings import EMPTY, MOST_MISSING, WITH_COUNTS, PackSide, format_of
from msprobe_engine.formats.pack import entries


def of_one_side(bench: PackSide, cmp: PackSide) -> list[str]:
    """Sentences about entries, or parts of them, that one of two packs has alone. Only packs of this tool that
    were made in the same way have the same entries; ranks of which one pack has nothing are said elsewhere."""
    if not (bench.pack.ours and cmp.pack.ours) or (bench.world_size is None) != (cmp.world_size is None):
        return []
    sentences: list[str] = []
    ranks = set(bench.pack.ranks) & set(cmp.pack.ranks)
    for who, side, other in (("bench", bench, cmp), ("cmp", cmp, bench)):
        only = [name for name in side.pack.names if name not in other.pack and _is_compared(name, ranks, other)]
        if only:
            more = f" and {len(only) - MOST_MISSING} more" if len(only) > MOST_MISSING else ""
            sentences.append(f"only the {SIDES[who]} pack has {', '.join(only[:MOST_MISSING])}{more}, so what is in there is not compared")
        sentences += [f"only in the {SIDES[who]} pack something is in {name}" for name in _find_emptied_entries(side, other)]
        for part in ("system", "random"):  # of ranks only those that there are: a launcher tells where they run
            if parts := _parts_of_one_side(side, other, part):
                more = f" and {len(parts) - MOST_MISSING} more" if len(parts) > MOST_MISSING else ""
                sentences.append(
                    f"only the {SIDES[who]} pack has {', '.join(parts[:MOST_MISSING])}{more} of {part}, so this is not compared"
                )
    return sentences


def _is_compared(name: str, ranks: set[int], other: PackSide) -> bool:
    """Whether the other pack should have it, too: not of a rank that it does not have, no list that it is too old for, and not of the first
    step of a run that began with another one."""
    of_rank, of_step = entries.ranks_of(name), entries.steps_of(name) or entries.existing_of(name)
    if of_rank is not None and of_rank[0] == "withheld" and format_of(other) < WITH_COUNTS:
        return False
    rank = of_rank[1] if of_rank is not None else of_step[2] if of_step is not None else None
    if of_step is not None and _of_other_steps(of_step, other):
        return False
    return rank is None or rank in ranks


def _of_other_steps(of_step: tuple[str, int, int], other: PackSide) -> bool:
    """The other pack has the same of the rank, of one step alone and of another one."""
    kind, step, rank = of_step
    steps = {place[1] for name in other.pack.names if (place := entries.steps_of(name)) is not None and place[::2] == (kind, rank)}
    return len(steps) == 1 and step not in steps


def _find_emptied_entries(side: PackSide, other: PackSide) -> list[str]:
    """Entries that are empty on the other side alone."""
    both = (name for name in side.pack.names if name in other.pack)
    return [name for name in both if other.pack.size(name) <= EMPTY < side.pack.size(name)][:MOST_MISSING]


def _parts_of_one_side(side: PackSide, other: PackSide, part: str) -> list[str]:
    """Names of what an entry of `part` holds, one level deep, and of random states two, where the other pack has nothing of it."""
    entries_here, entries_there = side.pack.by_rank(part), other.pack.by_rank(part)
    names = set()
    for rank in entries_here.keys() & entries_there.keys():
        content, other_content = side.read_mapping(entries_here[rank]), other.read_mapping(entries_there[rank])
        names |= {name for name, value in content.items() if value not in ({}, [], None) and other_content.get(name) in ({}, [], None)}
        if part == "random":
            states, others = content.get("states"), other_content.get("states")
            if isinstance(states, dict) and isinstance(others, dict):
                names |= {f"states.{name}" for name in states if name not in others}
    return sorted(names)
