"""Calls of one side only that are another way to the same numbers: wrappers around the model, buckets of gradients, an optimizer that
updates all parameters in one call. Where the numbers agree they are no difference between the runs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Set

from msprobe_engine.align.calls.call_tree import FOREACH, FUSED, Tree, calls_function
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.align.parallel import experts
from msprobe_engine.align.parameters.prefixes import bare, strip_wrappers
from msprobe_engine.core import names
from msprobe_engine.core.operator_traits import SCALINGS, is_product, of_reducer
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.core.text.source_line import library_function
from msprobe_engine.formats.dump.dump_table import OUTPUT

_WITHOUT_EFFECT = frozenset(("zero_", "detach_", "requires_grad_", "record_stream_"))
"""Calls in place that change no number that a training goes on with: gradients are set to zero in place of being given up."""
_RANDOM = ("drop", "rand", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_", "seed")


def select_possible_differences(tree: Tree, other: Tree, records: Iterable[int]) -> list[int]:
    """The records of a tree, without partners in the other one, that may be a difference."""
    update = tree.last_backward if update_in_other_ways(tree, other) else len(tree.kinds)
    return [op for op in records if op <= update and not of_reducer(tree.side.ops[op]) and not _is_wrapper(tree, op)]


def recorded_within(tree: Tree, other: Tree, partners: Mapping[int, int], records: Iterable[int]) -> list[int]:
    """Of the records, which a tree alone has, those that are not inside of a module of which the other side recorded the call and nothing
    in it (it was compiled, or is one kernel): what it gives out tells of them.

    Args:
        partners: record of the tree -> that of the other one.
    """
    forward = [op for op, kind in enumerate(other.kinds) if kind[0] == "forward"]
    if forward and all(_is_wrapper(other, op) for op in forward):
        return []  # the whole model is such a module

    def is_closed(op: int) -> bool:
        around = next((one for one in tree.above(op) if one in partners), -1)
        return around >= 0 and len(tree.kinds[around]) == 4 and not other.children.get(partners[around])

    return [op for op in records if not is_closed(op)]


def change_something(tree: Tree, records: Iterable[int], replaced: bool) -> bool:
    """Some of the records, which one side alone has, change tensors in place, draw random numbers or tell other ranks something. The others
    give what later calls take in: where the numbers of these are the same they are another way to them, or nothing comes of them
    (logging). A product that nothing stands in place of counts, too.

    Args:
        tree, records: the calls of the side that has them.
        replaced: the other side has some alone as well.
    """
    known = set(records)
    calls = [op for op in records if len(tree.kinds[op]) == 3 and not _hands_on_all(tree, op) and not _leaves_all(tree, op)]
    calls = [op for op in calls if not _writes_into_own(tree, op, known) and not _counts_for_itself(tree, op, known)]
    products = not replaced and any(is_product(tree.kinds[op][-1]) for op in calls)
    return products or any(_speaks(tree.side.ops[op]) or _changes(tree.kinds[op][-1]) for op in calls)


def _speaks(name: str) -> bool:
    """A collective that does more than fetch what other ranks hold: when, and how often, makes no other numbers (weights that are given up
    between the passes, or kept; messages of another schedule of the pipeline)."""
    return names.is_collective(name) and not any(word in name for word in ("all_gather", "allgather", "isend", "irecv"))


def _hands_on_all(tree: Tree, op: int) -> bool:
    """A dropout of nothing: it gives the numbers that it takes in."""
    side = tree.side
    if "drop" not in tree.kinds[op][-1]:
        return False
    taken = [side.stats[row].tobytes() for row in tree.tensors_in(op)]
    given = [side.stats[row].tobytes() for row in side.rows(op) if side.role[row] == OUTPUT]
    return bool(given) and taken[: len(given)] == given


def _leaves_all(tree: Tree, op: int) -> bool:
    """A call in place behind which its tensor has the numbers that it had before: what is read back from a checkpoint. A factor that
    rounding swallows (a decay of a weight of 1 in bf16) is no such call: it moves another weight."""
    return gives_what_it_takes(tree, op) and factor_of(tree, op) == 1.0


def gives_what_it_takes(tree: Tree, op: int) -> bool:
    """A call in place that changes no statistic of its tensor."""
    side, rows = tree.side, tree.side.rows(op)
    taken, given = next(iter(tree.tensors_in(op)), -1), next((row for row in rows if side.role[row] == OUTPUT), -1)
    return taken >= 0 <= given and _changes(tree.kinds[op][-1]) and side.stats[taken].tobytes() == side.stats[given].tobytes()


def factor_of(tree: Tree, op: int) -> float:
    """The Python number that a call multiplies or divides a tensor by; 1.0 of any other call."""
    side = tree.side
    if tree.kinds[op][-1] not in SCALINGS:
        return 1.0
    return next((value for row in side.rows(op) if isinstance(value := side.values.get(row), float)), 1.0)


def _writes_into_own(tree: Tree, op: int, records: Set[int]) -> bool:
    """A call in place, which draws nothing, of a tensor that another of the records has made: who uses it tells."""
    api = tree.kinds[op][-1]
    written = next(iter(tree.tensors_in(op)), -1)
    return _changes(api) and not any(word in api for word in _RANDOM) and tree.producers.get(written) in records


def _counts_for_itself(tree: Tree, op: int, records: Set[int]) -> bool:
    """A call that counts in one whole number which no other record than these has, before or behind it: how often an average of the weights
    was made."""
    side, written = tree.side, next(iter(tree.tensors_in(op)), -1)
    if written < 0 or tree.kinds[op][-1] not in ("__iadd__", "add_") or side.shape[written] != [] or "int" not in str(side.dtype[written]):
        return False
    counts = {side.stats[row].tobytes() for row in side.rows(op) if side.dtype[row] == side.dtype[written]}
    return not any(
        side.dtype[row] == side.dtype[written] and side.shape[row] == [] and side.stats[row].tobytes() in counts
        for row in range(len(side))
        if side.op[row] not in records
    )


def _changes(api: str) -> bool:
    if api.startswith("__"):
        return (api.startswith("__i") and api not in ("__invert__", "__index__", "__int__")) or api == "__setitem__"
    return (api.endswith("_") and api not in _WITHOUT_EFFECT) or any(word in api for word in _RANDOM)


def more_passes(target: Tree, golden: Tree) -> str | None:
    """That one run calls most modules more often than the other one, without the calls that the backward pass makes again: a pass more
    through the model is no other way to the same numbers."""
    calls = [
        Counter(kind[2] for op, kind in enumerate(tree.kinds) if kind[0] == "forward" and len(kind) == 4 and op not in tree.recomputed)
        for tree in (target, golden)
    ]
    shared = calls[0].keys() & calls[1].keys()
    for more_calls, fewer_calls in (calls, calls[::-1]):
        more = [path for path in shared if more_calls[path] > fewer_calls[path]]
        if 2 * len(more) > len(shared):
            path = min(more, key=lambda path: (path.count("."), path))
            template = "{0} of {1} modules are called another number of times in a step: {2} {3} times, in the golden run {4} times"
            return Sentence(template, len(more), len(shared), path, calls[0][path], calls[1][path])
    return None


def update_in_other_ways(tree: Tree, other: Tree) -> bool:
    """Both optimizers are there, and make other calls."""
    return min(tree.first_update, other.first_update) >= 0 and tree.way_of_update != other.way_of_update


def without_updates(structure: Structure, target: Tree, golden: Tree) -> Structure:
    """Calls of several parameters, of two optimizers with other calls, are no pairs: each uses the same functions for other things."""
    if not update_in_other_ways(target, golden):
        return structure
    behind = target.first_update, golden.first_update
    apart = {
        (op, other)
        for op, other in structure.pairs
        if op >= behind[0] and other >= behind[1] and target.kinds[op][-1].startswith((FOREACH, FUSED))
    }
    return _without(structure, apart)


def without_other_code(structure: Structure, target: Tree, golden: Tree) -> Structure:
    """Calls behind the forward pass that functions of libraries make, each side another one, are no pairs: two ways to sum up gradients,
    to clip them or to update use the same functions for other things."""
    apart = set()
    for op, golden_op in structure.pairs:
        if op > target.first_backward and golden_op > golden.first_backward and calls_function(target.kinds[op]):
            target_function, golden_function = _library_function(target, op), _library_function(golden, golden_op)
            if target_function and golden_function and target_function != golden_function:
                apart.add((op, golden_op))
    return _without(structure, apart)


def without_other_exchange(structure: Structure, target: Tree, golden: Tree) -> Structure:
    """Calls around experts that tokens are brought to in another way are no pairs: the same functions handle other tokens. What the experts
    take in and the module around them gives out tells."""
    around, golden_around = exchanged_otherwise(structure, target, golden)
    return _without(structure, {(op, other) for op, other in structure.pairs if op in around or other in golden_around})


def exchanged_otherwise(structure: Structure, target: Tree, golden: Tree) -> tuple[dict[int, str], dict[int, str]]:
    """Calls of the target and of the golden side right inside of a module that holds experts, where each side alone calls collectives (an
    all-to-all, or a gather of all tokens) -> the path of that module."""
    lone = ((target, structure.only_target), (golden, structure.only_golden))
    collectives = [[op for op in records if names.is_collective(tree.side.ops[op])] for tree, records in lone]
    if not all(collectives):
        return {}, {}
    around = experts.around(target), experts.around(golden)
    paths = [{calls[op] for op in records if op in calls} for records, calls in zip(collectives, around)]
    both = paths[0] & paths[1]
    found, golden_found = ({op: path for op, path in calls.items() if path in both} for calls in around)
    return found, golden_found


def _library_function(tree: Tree, op: int) -> tuple[str, str] | None:
    stack = tree.side.stacks.get(tree.side.ops[op])
    return library_function(stack[0]) if stack else None


def _without(structure: Structure, apart: set[tuple[int, int]]) -> Structure:
    return dataclasses.replace(
        structure,
        pairs=[pair for pair in structure.pairs if pair not in apart],
        only_target=sorted([*structure.only_target, *(op for op, _ in apart)]),
        only_golden=sorted([*structure.only_golden, *(other for _, other in apart)]),
    )


def only_wrapped(renamed: Mapping[str, str]) -> bool:
    """Modules bear other names because of a wrapper around the model (``module.layers.0``) alone."""
    pairs = [
        (target_name, golden_name) if len(target_name) >= len(golden_name) else (golden_name, target_name)
        for target_name, golden_name in renamed.items()
    ]
    wrappers = {longer.removesuffix(shorter) for longer, shorter in pairs if longer.endswith(f".{shorter}")}
    one_wrapper = len(wrappers) == 1 and all(longer.endswith(f".{shorter}") for longer, shorter in pairs)
    return one_wrapper or all(bare(target_name) == bare(golden_name) for target_name, golden_name in renamed.items())


def describe_ways_of_update(target: Tree, golden: Tree) -> str | None:
    """That the optimizers update in other ways."""
    if not update_in_other_ways(target, golden):
        return None
    target_way, golden_way = target.way_of_update, golden.way_of_update
    if target_way and golden_way:
        template = "The optimizer of this run updates by calls of {0}, that of the golden run by calls of {1}."
        return Sentence(template, f"{target_way.strip('_')}", f"{golden_way.strip('_')}")
    if target_way:
        return Sentence("The optimizer of this run updates several parameters by one call, that of the golden run each by itself.")
    return Sentence("The optimizer of this run updates each parameter by itself, that of the golden run several by one call.")


def _is_wrapper(tree: Tree, op: int) -> bool:
    """A call of a module around the whole model."""
    kind = tree.kinds[op]
    return len(kind) == 4 and not strip_wrappers(kind[2])
