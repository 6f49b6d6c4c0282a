"""Suspects in the update bear the name of a function only: which parameter it updates is told by the numbers that it takes in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msprobe_engine.align.calls.call_tree import Tree, calls_function
from msprobe_engine.align.parallel.parameter_owner import Owner, owners
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.findings import Suspect

if TYPE_CHECKING:
    from msprobe_engine.find.difference.divergence import Divergence


def name_parameters(suspects: Sequence[Suspect], divergence: Divergence) -> None:
    """Put the parameter in front of ``why``.

    Args:
        suspects: those of the first origins of `divergence`, in their order; changed in place.
        divergence: the step that has the origins.
    """
    known: dict[int, tuple[Mapping[int, Owner], Mapping[int, Owner]]] = {}
    for suspect, (rank, origin) in zip(suspects, divergence.origins):
        walker = divergence.walkers[rank]
        mine = _calls(walker.target, origin.op, origin.row)
        theirs = _calls(walker.golden, origin.partner, origin.other)
        if not mine and not theirs:
            continue
        if rank not in known:
            known[rank] = owners(walker.target), owners(walker.golden)
        here, there = known[rank]
        named = [owner for side, calls in ((here, mine), (there, theirs)) for op in calls if (owner := side.get(op))]
        if named:
            owner = named[0]
            name = ".".join(part for part in owner if part)
            suspect.parameter = name
            suspect.why = Sentence("in the update of parameter {0} by the optimizer: {1}", name, suspect.why)


def name_learning_rate(first: Suspect, others: Iterable[Suspect]) -> None:
    """``1 - lr * weight_decay`` is off because of either: where the size of the step is off in the same step, it is the rate."""
    sized = any("step_size" in one.cause and one.step == first.step for one in others)
    if "step_size" in first.cause or ("lr * weight_decay" in first.cause and sized):
        first.cause = Sentence("{0} (the size of the step: the learning rate)", first.cause)


def _calls(tree: Tree, op: int, row: int) -> list[int]:
    """The calls of an origin that may be part of an update: the one to blame, and the one whose row shows it."""
    return [call for call in dict.fromkeys((op, tree.side.op[row] if row >= 0 else -1)) if _in_update(tree, call)]


def _in_update(tree: Tree, op: int) -> bool:
    """A call of a function that no module makes; `owners` knows those behind the first call of a backward pass."""
    if op < 0 or not calls_function(tree.kinds[op]) or tree.kinds[op][1] == "Distributed":
        return False
    return not any(len(tree.kinds[above]) == 4 for above in tree.above(op))
