"""Copies of a tensor that are the same on all ranks of a group, because they are the sum of what these ranks have put in, and that a call
makes other ones of: the ranks draw other random numbers where each has to draw those of the others (dropout outside of the region in which
tensor-parallel ranks hold parts)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msprobe_engine.align.calls.call_tree import Tree, calls_function
from msprobe_engine.core.operator_traits import RANDOM_MASKS, normal_op
from msprobe_engine.core.text.ranges import ranks_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.core.text.source_line import source_of
from msprobe_engine.find.collectives.links import Links
from msprobe_engine.find.difference.explain import module_around, stack_of
from msprobe_engine.find.findings import Suspect
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, DumpTable


def parted_by_random_numbers(step: int, sides: Mapping[int, DumpTable], found: Links) -> list[Suspect]:
    """The first call of each group of ranks that parts such copies, in the forward pass."""
    sums: dict[tuple[int, ...], set[str]] = {}
    for link in found.links:
        ranks = tuple(sorted(rank for rank, _ in link.members))
        names = {sides[rank].ops[op] for rank, op in link.members if rank in sides}
        if normal_op(link.op) == "allreduce" and not link.missing and len(ranks) > 1 and sides.keys() >= set(ranks) and len(names) == 1:
            sums.setdefault(ranks, set()).update(names)
    parted = (_first_parted([sides[rank] for rank in ranks], names) for ranks, names in sums.items())
    return [_suspect(step, ranks, sides[ranks[-1]], name) for ranks, name in zip(sums, parted) if name is not None]


def _first_parted(sides: Sequence[DumpTable], sums: set[str]) -> str | None:
    """Name of the record; `sums`: those of the collectives that sum up over just these ranks."""
    tree = Tree(sides[0])
    if not any(calls_function(kind) and kind[2] in RANDOM_MASKS for kind in tree.kinds):
        return None
    places = [{name: op for op, name in enumerate(side.ops)} for side in sides]
    copies: set[int] = set()  # records that give the same on all ranks, of such a sum
    for op, name in enumerate(sides[0].ops[: tree.first_backward]):
        calls = [(side, place[name]) for side, place in zip(sides, places) if name in place]
        if len(calls) < len(sides):
            continue
        if name in sums:
            copies |= {op} if _is_same(calls, (OUTPUT,)) else set()
        elif calls_function(tree.kinds[op]) and any(tree.producers.get(row) in copies for row in tree.tensors_in(op)):
            if not _is_same(calls, (INPUT, PARAMETERS)):
                continue
            if _is_same(calls, (OUTPUT,)):
                copies.add(op)
            elif tree.kinds[op][2] in RANDOM_MASKS:
                return name
    return None


def _is_same(calls: Sequence[tuple[DumpTable, int]], roles: Sequence[int]) -> bool:
    return len({tuple(_rows(side, op, roles)) for side, op in calls}) == 1


def _rows(side: DumpTable, op: int, roles: Sequence[int]) -> Iterator[tuple[object, ...]]:
    """What is known of each tensor and argument of a record."""
    for row in side.rows(op):
        if side.role[row] in roles:
            digest = side.extra.get(row, {}).get("digest")
            yield side.name[row], str(side.shape[row]), side.stats[row].tobytes(), side.md5[row], digest, str(side.values.get(row))


def _suspect(step: int, ranks: Sequence[int], side: DumpTable, name: str) -> Suspect:
    template = "{0} take in the same sum of what they have put in, and what comes out is not the same: they draw other random numbers"
    why = Sentence(template, ranks_text(ranks))
    stack = stack_of(side, name)
    return Suspect(name, module_around(side, name), ranks[-1], step, source_of(stack), "desync", why, stack=stack, ranks=list(ranks))
