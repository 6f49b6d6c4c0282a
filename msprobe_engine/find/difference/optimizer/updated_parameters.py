"""Suspects in the update bear the name of a function only: which parameter it updates is told by the numbers that it takes in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msprobe_engine.align.calls.call_tree import Tree, calls_function
from msprobe_engine.align.parallel.parameter_owner import Mark, Owner, mark, owners_and_tensors, with_calls_between
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.difference.optimizer.common_factor import ALIKE, SEVERAL
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.origin import TAKEN, DifferenceOrigin
from msprobe_engine.formats.dump.dump_table import INPUT

if TYPE_CHECKING:
    from msprobe_engine.find.difference.divergence import Divergence
    from msprobe_engine.find.difference.walk import DifferenceWalk

_Owners = tuple[Mapping[int, Owner], Mapping[Mark, Owner | None]]


def name_parameters(suspects: Sequence[Suspect], divergence: Divergence) -> None:
    """Put the parameter in front of ``why``.

    Args:
        suspects: those of the first origins of `divergence`, in their order; changed in place.
        divergence: the step that has the origins.
    """
    known: dict[int, tuple[_Owners, _Owners]] = {}
    for suspect, (rank, origin) in zip(suspects, divergence.origins):
        walker = divergence.walkers[rank]
        target_calls = _calls(walker.target, origin.op, origin.row)
        golden_calls = _calls(walker.golden, origin.partner, origin.other)
        if not target_calls and not golden_calls:
            continue
        if rank not in known:
            known[rank] = walker.owners, owners_and_tensors(walker.golden)
        of_target, of_golden = known[rank]
        calls_of_sides = (walker.target, of_target[0], target_calls), (walker.golden, of_golden[0], golden_calls)
        named = [owner for _, owned, calls in calls_of_sides for op in calls if (owner := owned.get(op))]
        if not named:  # what is given to it has no number that tells, but the calls around it are of one parameter
            around = ((with_calls_between(owned, tree), calls) for tree, owned, calls in calls_of_sides if calls)
            named = [owner for owned, calls in around for op in calls if (owner := owned.get(op))]
        if not named and (scaled := _scaled_alike(walker, origin)) is not None:
            suspect.why = Sentence("{0}; {1} of {2} tensors that go into this call are {3} times the golden run's", suspect.why, *scaled)
        elif not named:  # a call on all parameters at once
            rows = (walker.side, origin.row, of_target[1]), (walker.golden.side, origin.other, of_golden[1])
            named = [owner for side, row, of in rows if row >= 0 and (tensor_mark := mark(side, row)) and (owner := of.get(tensor_mark))]
        if named:
            owner = named[0]
            name = ".".join(part for part in owner if part)
            suspect.parameter = name
            suspect.why = Sentence("in the update of parameter {0} by the optimizer: {1}", name, suspect.why)


def _scaled_alike(walker: DifferenceWalk, origin: DifferenceOrigin) -> tuple[str, str, str] | None:
    """(how many of the tensors of a list are off by the factor that one is off by, of how many, the factor), where most are: what scales
    all of them is to blame, and no parameter."""
    target_stats, golden_stats = walker.side.stats, walker.golden.side.stats
    pairs = [walker.rows[pair_position] for pair_position in walker.span_of(origin.op)]
    tensors = [pair for pair in pairs if walker.side.role[pair[0]] == INPUT and pair[0] not in walker.side.values]
    factors = [target_stats[i][3] / golden_stats[j][3] for i, j in tensors if golden_stats[j][3] > 0]
    if origin.kind != TAKEN or origin.row < 0 or not golden_stats[origin.other][3] > 0:
        return None
    factor = target_stats[origin.row][3] / golden_stats[origin.other][3]
    alike = sum(abs(other_factor / factor - 1) < ALIKE for other_factor in factors)
    several = len(factors) >= SEVERAL and 2 * alike > len(factors)
    return (f"{alike}", f"{len(factors)}", f"{factor:.3g}") if several and abs(factor - 1) > ALIKE else None


def name_learning_rate(first: Suspect, others: Iterable[Suspect]) -> None:
    """``1 - lr * weight_decay`` is off because of either: where the size of the step is off in the same step, it is the rate."""
    sized = any("step_size" in suspect.cause and suspect.step == first.step for suspect in others)
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
