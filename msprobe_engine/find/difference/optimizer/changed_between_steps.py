"""What one run alone changed behind the update of a step, found by what the next step takes in.

Up to there both runs hold the same numbers to the last bit. One run goes on with calls of its own from a tensor that both came to, in place
(an average of the weights that is made twice), and the next step takes in what these gave, and in the other run what both came to. No
rounding is asked: that a change is small does not make it another way to the same numbers.
"""

from __future__ import annotations

import dataclasses

from msprobe_engine.align.calls.alignment import are_of_different_frameworks
from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.core.operator_traits import CASTS, MOVES
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.difference import explain, first_difference
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.difference.harmless import left_out
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.origin import EXTRA, MISSING, PARAMETER, TAKEN, DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import OUTPUT
from msprobe_engine.measure import dump_dialects


def changed_before(before: int, previous: Divergence, walked: Divergence) -> list[Suspect]:
    """The calls of one run alone that made the first difference of a step.

    Args:
        before: the step before, of `previous`; nothing differs in it.
        walked: the step that begins with a difference.
    """
    if previous.wholes or walked.wholes:
        return []
    suspects = []
    for rank, origin in walked.of_each(first_difference.of_rank).items():
        if origin is None or origin.kind not in (TAKEN, PARAMETER) or rank not in previous.walkers:
            continue
        sides = previous.walkers[rank].side, previous.walkers[rank].golden.side
        if are_of_different_frameworks(*sides) or dump_dialects.differ(*sides):
            continue
        found = _of_rank(previous.walkers[rank], walked.walkers[rank], origin)
        if found is None:
            continue
        made, said = found, walked.walkers[rank].side.ops[origin.op]
        if made.kind == EXTRA:
            template = "only this run makes this call, behind what both have come to; {0} of the next step takes in what is made with it"
        else:
            template = "only the golden run makes this call, behind what both have come to; {0} of the next step lacks it"
        suspect = explain.suspect(before, rank, made, previous.walkers[rank])
        suspects.append(dataclasses.replace(suspect, why=Sentence(template, said), distance=None, limit=None))
    return suspects


def _of_rank(previous: DifferenceWalk, walker: DifferenceWalk, origin: DifferenceOrigin) -> DifferenceOrigin | None:
    sides = (previous.target, walker.side, origin.row), (previous.golden, walker.golden.side, origin.other)
    last = [_last_that_gives(tree, left_out.content_of(side, row)) for tree, side, row in sides]
    partners = dict(previous.structure.pairs), previous.back
    for k, alone in enumerate((previous.extra, previous.missing)):
        if last[k] not in alone or last[1 - k] < 0:
            continue
        both = partners[1 - k].get(last[1 - k])  # the call of this side that gives what the other side goes on with
        if both is None or both > last[k]:
            continue
        tree = (previous.target, previous.golden)[k]
        chain = _chain(tree, both, last[k])
        if chain and alone.issuperset(chain) and any(_computes(tree, op) for op in chain):
            return DifferenceOrigin(0, chain[0], MISSING, -1, -1, 0, 0, 0) if k else DifferenceOrigin(chain[0], -1, EXTRA, -1, -1, 0, 0, 0)
    return None


def _last_that_gives(tree: Tree, content: object) -> int:
    """The last call behind the backward pass that gives a tensor; -1: none."""
    side = tree.side
    for op in range(len(tree.kinds) - 1, tree.last_backward, -1):
        if any(side.role[row] == OUTPUT and left_out.content_of(side, row) == content for row in side.rows(op)):
            return op
    return -1


def _chain(tree: Tree, start: int, end: int) -> list[int]:
    """Calls from what `start` gives to what `end` gives, in order, without `start`; empty: none leads there."""
    chain, op = [end], end
    while True:
        sources = [source for row in tree.tensors_in(op)[:1] if (source := tree.producers.get(row)) is not None]
        if start in sources:
            return chain[::-1]
        if not sources or sources[0] <= start:
            return []
        op = sources[0]
        chain.append(op)


def _computes(tree: Tree, op: int) -> bool:
    return tree.kinds[op][-1].endswith("_") and tree.kinds[op][-1] not in MOVES | CASTS
