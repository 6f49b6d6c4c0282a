"""The suspects of one step: its origins in words, or what its records say beside numbers.

Parameters that the optimizer of one side does not update, or updates by a factor more: the calls are there on the other side only, from
the first update on, long before the numbers of a forward pass tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from msprobe_engine.align.calls.alignment import are_of_different_frameworks
from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.parallel.merge_records import origin_of
from msprobe_engine.align.parallel.parameter_owner import Owner, owners
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.coverage import other_ways
from msprobe_engine.find.difference import call_facts, explain, layouts
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.difference.evidence import Precision
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.fold_suspects import MOST_SUSPECTS, firsts, stages_of
from msprobe_engine.find.origin import EXTRA, MISSING, PRECISION, DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import PARAMETERS, DumpTable
from msprobe_engine.measure import dump_dialects

Look = Callable[[DifferenceWalk, int, int], list[Suspect]]
"""(walk, step, rank) -> what is seen there."""


def of_origins(step: int, divergence: Divergence) -> list[Suspect]:
    """Where differences begin, the most likely first. The first ones have words, and the first ones of those that are not the same."""
    suspects = [_of_origin(explain.place, step, divergence, number) for number in range(len(divergence.origins))]
    stages = stages_of({rank: walker.side for rank, walker in divergence.walkers.items()})
    for number in {*range(min(MOST_SUSPECTS, len(suspects))), *firsts(suspects, stages)[:MOST_SUSPECTS]}:
        suspects[number] = _of_origin(explain.suspect, step, divergence, number)
    return suspects


def _of_origin(
    put: Callable[[int, int, DifferenceOrigin, DifferenceWalk], Suspect], step: int, divergence: Divergence, number: int
) -> Suspect:
    rank, origin = divergence.origins[number]
    return _locate_in_dump(put(step, layouts.rank_of(divergence, rank, origin), origin, divergence.walkers[rank]), divergence, rank, origin)


def of_precision(step: int, divergence: Divergence, other: Precision) -> Suspect:
    """The first record of runs that are of different precision as a whole."""
    walker = divergence.walkers[other.rank]
    row, partner = walker.rows[other.at]
    op, golden = walker.side.op[row], walker.golden.side.op[partner]
    origin = DifferenceOrigin(op, golden, PRECISION, row, partner, 0.0, 0.0, 0.0)
    types = [dtype.removeprefix("torch.") for dtype in (other.target, other.golden)]
    return dataclasses.replace(
        explain.suspect(step, layouts.rank_of(divergence, other.rank, origin), origin, walker),
        why=other.sentence(),
        cause=Sentence("{0}, golden {1}", *types),
        distance=None,
        limit=None,
    )


def of_facts(step: int, divergence: Divergence) -> list[Suspect]:
    """Records that say something else beside numbers, by rank; what is cut in another way has other arguments, but for numbers such as a
    learning rate."""
    looks: list[Look] = [call_facts.find_differing_calls, no_update]
    looks += [] if divergence.wholes else [find_one_sided_updates, find_swallowed_factors]
    return [suspect for look in looks for suspect in _of_ranks(step, divergence, look)]


def _of_ranks(step: int, divergence: Divergence, look: Look) -> Iterator[Suspect]:
    """What is seen in each rank; in ranks that are walked together it is the same."""
    for rank, some in divergence.of_each(lambda walker: look(walker, step, 0)).items():
        yield from (dataclasses.replace(suspect, rank=rank) for suspect in some)


# Suspects of runs that were put together from stages and experts: named as in the dump of the rank they are on.
def _locate_in_dump(suspect: Suspect, divergence: Divergence, rank: int, origin: DifferenceOrigin) -> Suspect:
    """The suspect with record, tensor and partner as they are called where they were dumped; `module` is the path in the whole model.

    Args:
        suspect: as `explain.suspect` made it; its rank is the one replica that is off, or the lowest rank.
        rank: of the walk.
    """
    walker = divergence.walkers[rank]
    target, golden = walker.side, walker.golden.side
    shown, op = (golden, origin.partner) if origin.kind == MISSING else (target, origin.op)
    origin_in_dump = origin_of(target, origin.op)
    return dataclasses.replace(
        suspect,
        record=_name(shown, op),
        rank=suspect.rank if origin_in_dump is None else origin_in_dump[0] + suspect.rank - rank,  # pipelines are cut alike, rank by rank
        partner=_name(golden, origin.partner) if origin.partner >= 0 else "",
        tensor=_row(target, origin.row) if origin.row >= 0 else "",
        why=suspect.why
        if _name(shown, op) == shown.ops[op]
        else Sentence("{0} ({1} in the order of the whole model)", suspect.why, shown.ops[op]),
    )


def _name(side: DumpTable, op: int) -> str:
    origin = origin_of(side, op)
    return side.ops[op] if origin is None else origin[1]


def _row(side: DumpTable, row: int) -> str:
    op = side.op[row]
    return _name(side, op) + side.name[row][len(side.ops[op]) :]


def find_one_sided_updates(walker: DifferenceWalk, step: int, rank: int) -> list[Suspect]:
    """The parameters of a rank that one side alone updates, in the order of the model; of two frameworks, and where the calls of an update
    are not known to be of a parameter (several in one call), none."""
    sides = walker.side, walker.golden.side
    if not (walker.missing or walker.extra) or are_of_different_frameworks(*sides) or dump_dialects.differ(*sides):
        return []
    target_calls, golden_calls = _first_calls(walker.target), _first_calls(walker.golden)
    if not target_calls or not golden_calls or walker.target.changes_several or walker.golden.changes_several:
        return []
    of_target = set(_parameters(walker.target))
    suspects: list[Suspect] = []
    for owner in dict.fromkeys(owner for owner in _parameters(walker.golden) if owner in of_target):
        name = ".".join(part for part in owner if part)
        if owner in golden_calls and owner not in target_calls and walker.missing:
            why = Sentence("the optimizer of the golden run updates parameter {0}, and that of this run does not", name)
            origin = DifferenceOrigin(0, golden_calls[owner], MISSING, -1, -1, 0.0, 0.0, 0.0)
        elif owner in target_calls and owner not in golden_calls and walker.extra:
            why = Sentence("the optimizer of this run updates parameter {0}, and that of the golden run does not", name)
            origin = DifferenceOrigin(target_calls[owner], -1, EXTRA, -1, -1, 0.0, 0.0, 0.0)
        else:
            continue
        suspect = explain.suspect(step, rank, origin, walker)
        suspects.append(dataclasses.replace(suspect, module=owner[0], why=why, distance=None, limit=None))
    return suspects


def find_swallowed_factors(walker: DifferenceWalk, step: int, rank: int) -> list[Suspect]:
    """Factors that the update of one run alone puts on parameters, and that rounding swallows in this step. Where the other run makes calls
    of its own for the parameter it may do the same by these."""
    two_frameworks = are_of_different_frameworks(walker.side, walker.golden.side)
    if two_frameworks or not walker.one_layout or other_ways.update_in_other_ways(walker.target, walker.golden):
        return []
    suspects: list[Suspect] = []
    sides = ((walker.target, walker.structure.only_target), (walker.golden, walker.structure.only_golden))
    for (tree, alone), (other_tree, other_alone) in (sides, sides[::-1]):
        behind = [op for op in alone if op > tree.last_backward and other_ways.factor_of(tree, op) != 1.0]
        if not behind:
            continue
        owned, other_owned = owners(tree), owners(other_tree)
        others = {other_owned[op] for op in other_alone if op in other_owned}
        for op in behind:
            row, owner = next(iter(tree.tensors_in(op)), -1), owned.get(op)
            if not owner or owner in others or not tree.side.requires_grad[row] or not other_ways.gives_what_it_takes(tree, op):
                continue
            template = "only the update of {0} multiplies parameter {1} by {2} (a decay); rounding swallows it in this step"
            if tree is walker.target:
                who, origin = Sentence("this run"), DifferenceOrigin(op, -1, EXTRA, row, -1, 0.0, 0.0, 0.0)
            else:
                who, origin = Sentence("the golden run"), DifferenceOrigin(0, op, MISSING, -1, row, 0.0, 0.0, 0.0)
            why = Sentence(template, who, ".".join(filter(None, owner)), f"{other_ways.factor_of(tree, op):g}")
            cause = explain.cause(origin, walker) or why
            suspects.append(
                dataclasses.replace(explain.suspect(step, rank, origin, walker), why=why, cause=cause, distance=None, limit=None)
            )
    return suspects


def no_update(walker: DifferenceWalk, step: int, rank: int) -> list[Suspect]:
    """One run updates its parameters behind the backward pass, and the other one updates none: it has no gradients, or its optimizer was
    not asked. Both record calls of functions and a backward pass."""
    trees = walker.target, walker.golden
    sides = walker.side, walker.golden.side
    cut_off = any(walker.structure.behind_cut)
    if (
        cut_off
        or are_of_different_frameworks(*sides)
        or dump_dialects.differ(*sides)
        or any(tree.last_backward >= len(tree.kinds) for tree in trees)
    ):
        return []
    firsts = [tree.first_update for tree in trees]
    if (firsts[0] < 0) == (firsts[1] < 0) or not all(any(len(kind) == 3 for kind in tree.kinds) for tree in trees):
        return []
    if firsts[0] < 0:
        origin = DifferenceOrigin(0, firsts[1], MISSING, -1, -1, 0.0, 0.0, 0.0)
        why = Sentence("the golden run updates its parameters behind the backward pass, and this run updates none")
    else:
        origin = DifferenceOrigin(firsts[0], -1, EXTRA, -1, -1, 0.0, 0.0, 0.0)
        why = Sentence("this run updates its parameters behind the backward pass, and the golden run updates none")
    return [dataclasses.replace(explain.suspect(step, rank, origin, walker), why=why, distance=None, limit=None)]


def _first_calls(tree: Tree) -> dict[Owner, int]:
    """Parameter -> the first call of the update that belongs to it."""
    calls: dict[Owner, int] = {}
    for op, owner in sorted(owners(tree).items()):
        if not any(len(tree.kinds[above]) == 4 for above in tree.above(op)):
            calls.setdefault(owner, op)
    return calls


def _parameters(tree: Tree) -> Iterator[Owner]:
    side = tree.side
    for row, role in enumerate(side.role):
        op = side.op[row]
        if role == PARAMETERS and len(tree.kinds[op]) == 4:
            yield tree.kinds[op][2], side.name[row][len(side.ops[op]) + 1 :].removeprefix("parameters.")
