"""Parameters that the optimizer of one side does not update: the calls are there on the other side only, from the first update on, long
before the numbers of a forward pass tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from msprobe_engine.align.calls.alignment import crossed
from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.parallel.parameter_owner import Owner, owners
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.difference import explain
from msprobe_engine.find.difference.origin import EXTRA, MISSING, DifferenceOrigin
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Suspect
from msprobe_engine.formats.dump.dump_table import PARAMETERS
from msprobe_engine.measure import dump_dialects


def differing(walker: DifferenceWalk, step: int, rank: int) -> list[Suspect]:
    """The parameters of a rank that one side alone updates, in the order of the model; of two frameworks, and where the calls of an update
    are not known to be of a parameter (several in one call), none."""
    sides = walker.side, walker.golden.side
    if not (walker.missing or walker.extra) or crossed(*sides) or dump_dialects.differ(*sides):
        return []
    mine, theirs = _first_calls(walker.target), _first_calls(walker.golden)
    if not mine or not theirs or walker.target.way_of_update or walker.golden.way_of_update:
        return []
    of_target = set(_parameters(walker.target))
    found: list[Suspect] = []
    for owner in dict.fromkeys(owner for owner in _parameters(walker.golden) if owner in of_target):
        name = ".".join(part for part in owner if part)
        if owner in theirs and owner not in mine and walker.missing:
            why = Sentence("the optimizer of the golden run updates parameter {0}, and that of this run does not", name)
            origin = DifferenceOrigin(0, theirs[owner], MISSING, -1, -1, 0.0, 0.0, 0.0)
        elif owner in mine and owner not in theirs and walker.extra:
            why = Sentence("the optimizer of this run updates parameter {0}, and that of the golden run does not", name)
            origin = DifferenceOrigin(mine[owner], -1, EXTRA, -1, -1, 0.0, 0.0, 0.0)
        else:
            continue
        suspect = explain.suspect(step, rank, origin, walker)
        found.append(dataclasses.replace(suspect, module=owner[0], why=why, distance=None, limit=None))
    return found


def no_update(walker: DifferenceWalk, step: int, rank: int) -> list[Suspect]:
    """One run updates its parameters behind the backward pass, and the other one updates none: it has no gradients, or its optimizer was
    not asked. Both record calls of functions and a backward pass."""
    trees = walker.target, walker.golden
    sides = walker.side, walker.golden.side
    cut_off = any(walker.structure.behind_cut)
    if cut_off or crossed(*sides) or dump_dialects.differ(*sides) or any(tree.last_backward >= len(tree.kinds) for tree in trees):
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
    found: dict[Owner, int] = {}
    for op, owner in sorted(owners(tree).items()):
        if not any(len(tree.kinds[above]) == 4 for above in tree.above(op)):
            found.setdefault(owner, op)
    return found


def _parameters(tree: Tree) -> Iterator[Owner]:
    side = tree.side
    for row, role in enumerate(side.role):
        op = side.op[row]
        if role == PARAMETERS and len(tree.kinds[op]) == 4:
            yield tree.kinds[op][2], side.name[row][len(side.ops[op]) + 1 :].removeprefix("parameters.")
