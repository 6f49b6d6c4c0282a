"""Calls that one of two runs makes alone, modules that bear other names, and calls in another order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from msprobe_engine.align.calls.alignment import are_of_different_frameworks
from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.core import names
from msprobe_engine.core.operator_traits import UNINITIALISED, of_reducer
from msprobe_engine.core.text.ranges import in_short
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.coverage import other_ways, renames, two_frameworks
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.find.difference.harmless import left_out
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.formats.dump.dump_table import OUTPUT
from msprobe_engine.measure import dump_dialects, roundoff
from msprobe_engine.measure.distances import Floats, elements
from msprobe_engine.measure.factorize import firsts


def add_one_sided_calls(diagnosis: Diagnosis, divergence: Divergence) -> bool:
    """Calls of one side alone, and their order; returns True where some of these calls may change something that no number shows."""
    counts = False
    _note_order(diagnosis, divergence)
    two_frameworks.add_coverage(diagnosis, divergence)
    divergence = divergence.different()
    for rank, structure in divergence.structures.items():
        walker = divergence.walkers[rank]
        trees = walker.target, walker.golden
        alone = ([], []) if rank in divergence.wholes else possible_differences(walker)  # layouts make other calls around collectives
        partners, brought = (dict(structure.pairs), walker.back), _calls_that_bring_tokens(walker)
        calls = zip(("target", "golden"), trees, trees[::-1], partners, alone, alone[::-1], brought)
        for word, tree, other, known_to, records, others, exchanged in calls:
            known = diagnosis.unmatched.setdefault(word, [])
            open_to_view = other_ways.recorded_within(tree, other, known_to, records)
            open_to_view = [op for op in open_to_view if op not in exchanged]
            counts = counts or len(open_to_view) > len(tree.kinds) // 2 or other_ways.change_something(tree, open_to_view, bool(others))
            counts = counts or _lacks_gradients(tree, open_to_view, known_to)
            known += [name for op in records[:100] if (name := tree.side.ops[op]) not in known]
        diagnosis.renamed.update(structure.renamed)
        if rank not in divergence.wholes:
            for word, places in zip(("target", "golden"), on_one_side(walker)):
                counts = counts or any(not names.is_module(name) for name in places)
                diagnosis.unmatched[word] += [name for name in places[:100] if name not in diagnosis.unmatched[word]]
    renames.add_renames(diagnosis, divergence)
    return counts


def _calls_that_bring_tokens(walker: DifferenceWalk) -> tuple[set[int], set[int]]:
    """Calls of the target and of the golden side that bring tokens to experts in another way, and back, where all that the modules around
    them give could be compared and agrees."""
    around = other_ways.exchanged_otherwise(walker.structure, walker.target, walker.golden)
    kinds, found = walker.target.kinds, set(around[0].values())
    for op, kind in enumerate(kinds if found else ()):
        if len(kind) == 4 and kind[2] in found and not _gives_the_same_tensors(walker, op):
            found.discard(kind[2])
    target, golden = ({op for op, path in calls.items() if path in found} for calls in around)
    return target, golden


def _gives_the_same_tensors(walker: DifferenceWalk, op: int) -> bool:
    """Some of what a record gives is a tensor, and all of these could be compared and agree."""
    sides = walker.side, walker.golden.side
    pairs = walker.result_pairs(op)
    tensors = [pair for pair in pairs if any(isinstance(side.shape[row], list) for side, row in zip(sides, walker.rows[pair]))]
    return bool(tensors) and all(walker.measured.known[pair] for pair in tensors) and not walker.is_off(op)


def possible_differences(walker: DifferenceWalk) -> tuple[list[int], list[int]]:
    """Records of the target and of the golden side that have no partner and may be a difference of the runs."""
    trees = walker.target, walker.golden
    both = trees[0].has_modules == trees[1].has_modules  # else one side was compiled or dumped at another level
    alone: list[list[int]] = []
    for tree, other, records in zip(trees, trees[::-1], (walker.structure.only_target, walker.structure.only_golden)):
        recorded = dump_dialects.recorded_by_both(tree.side, other.side)
        possible = other_ways.select_possible_differences(tree, other, records)
        alone.append([op for op in possible if recorded[op] and (both or not names.is_module(tree.side.ops[op]))])
    same = _come_to_the_same(walker, alone) if all(alone) else (set(), set())
    target_alone, golden_alone = ([op for op in some if op not in known] for some, known in zip(alone, same))
    return target_alone, golden_alone


def unseen_results(walker: DifferenceWalk) -> tuple[list[int], list[int]]:
    """Rows of gradients of parameters, and of what forward calls give, in records of one side alone, where nothing that is compared tells
    of them: no call takes them in, and no other record of either side holds their numbers."""
    trees = walker.target, walker.golden
    unseen: tuple[list[int], list[int]] = [], []
    if dump_dialects.differ(walker.side, walker.golden.side) or are_of_different_frameworks(walker.side, walker.golden.side):
        return unseen
    alone, partners = possible_differences(walker), (dict(walker.structure.pairs), walker.back)
    holders = [left_out.records_by_content(tree.side) if any(alone) else {} for tree in trees]
    for k, (tree, records) in enumerate(zip(trees, alone)):
        for op in other_ways.recorded_within(tree, trees[1 - k], partners[k], records):
            unseen[k].extend(
                row
                for row in _last_results(tree, op)
                if not left_out.stands_elsewhere(tree, row, holders[k]) and not holders[1 - k].get(left_out.content_of(tree.side, row))
            )
    return unseen


def _last_results(tree: Tree, op: int) -> list[int]:
    """Rows of what a record gives that no other one takes in. What a call before a backward pass gives to none is no part of the loss,
    whose gradients are compared; a single number behind one is for a log."""
    side, kind, trained = tree.side, tree.kinds[op], tree.last_backward < len(tree.kinds)
    if tree.gradients[op]:
        return [*side.rows(op)]
    if kind[0] != "forward" or kind[-1] in UNINITIALISED or names.is_collective(side.ops[op]) or tree.users.get(op):
        return []
    if trained and op < tree.last_backward:
        return []
    tensors = (row for row in side.rows(op) if side.role[row] == OUTPUT and isinstance(side.shape[row], list))
    return [row for row in tensors if not trained or elements(side.shape[row]) > 1]


def _come_to_the_same(walker: DifferenceWalk, alone: Sequence[Sequence[int]]) -> tuple[set[int], set[int]]:
    """Calls behind the backward pass, of each side alone, that give the same tensors (averages of weights, one by one or many by one call),
    and what was only made for these."""
    trees = walker.target, walker.golden
    behind = [[op for op in some if op > tree.last_backward] for tree, some in zip(trees, alone)]
    given = [
        [(op, row) for op in some for row in tree.side.rows(op) if tree.side.role[row] == OUTPUT and isinstance(tree.side.shape[row], list)]
        for tree, some in zip(trees, behind)
    ]
    without_difference: tuple[set[int], set[int]] = set(), set()
    if not all(given):
        return without_difference
    for own_rows, other_rows, tree, other, users, known in zip(given, given[::-1], trees, trees[::-1], walker.users, without_difference):
        numbers = other.side.stats[[row for _, row in other_rows]]
        without = {op for op, row in own_rows if not _is_among(tree.side.stats[row], tree.side.dtype[row], numbers)}
        known.update({op for op, _ in own_rows} - without)
        for op in sorted(without, reverse=True):
            if users.get(op) and known.issuperset(users[op]):
                known.add(op)
    return without_difference


def _is_among(numbers: Floats, dtype: str | None, others: Floats) -> bool:
    """Statistics of a tensor are those of one of the others, but for its rounding."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(others - numbers).max(1)
    return bool((apart <= 4 * roundoff.eps(dtype) * np.abs(numbers).max()).any())


def _lacks_gradients(tree: Tree, records: Iterable[int], partners: Mapping[int, int]) -> bool:
    """Gradients of parameters are results: where one side alone has some, and both sides have others, some never came."""
    some = any(tree.kinds[op][0] == "parameters_grad" for op in records)
    return some and any(tree.kinds[op][0] == "parameters_grad" for op in partners)


def _note_order(diagnosis: Diagnosis, divergence: Divergence) -> None:
    """Calls in another order are no difference of a number; of two frameworks and two recorders nobody expects one order. Ranks of one
    program have the same order, which is said once."""
    said: dict[tuple[str, ...], list[int]] = {}
    for rank, order in divergence.of_each(_other_order).items():
        if order is not None and rank not in divergence.wholes:
            said.setdefault(order, []).append(rank)
    for order, ranks in said.items():
        if len(ranks) == 1:
            template = "rank {0}: {1} records stand in another order than in the golden run, the first is {2}: record {3}, there {4}"
        else:
            template = "ranks {0}: {1} records stand in another order than in the golden run, the first is {2}: record {3}, there {4}"
        sentence = Sentence(template, in_short(ranks), *order)
        if sentence not in diagnosis.evidence:
            diagnosis.evidence.append(sentence)


def _other_order(walker: DifferenceWalk) -> tuple[str, ...] | None:
    """How many records stand elsewhere, the first of them, and its place on both sides."""
    side, golden = walker.side, walker.golden.side
    if are_of_different_frameworks(side, golden) or dump_dialects.differ(side, golden):
        return None
    moved = out_of_order([pair for pair in walker.structure.pairs if not of_reducer(side.ops[pair[0]])])
    return (f"{len(moved):,}", side.ops[moved[0][0]], str(moved[0][0] + 1), str(moved[0][1] + 1)) if moved else None


def on_one_side(walker: DifferenceWalk) -> tuple[list[str], list[str]]:
    """Names of outputs of forward calls that only the target has, and of those that only the golden side has.

    A place without a value (null) is there: the call returns None, or its recorder leaves the value out. Dumps of two tools are not asked,
    because each has its own rules of what it writes, nor those of two frameworks, whose functions give other things beside the result.
    """
    one_sided: tuple[list[str], list[str]] = [], []
    sides = walker.side, walker.golden.side
    if dump_dialects.differ(*sides) or are_of_different_frameworks(*sides) or not walker.structure.pairs:
        return one_sided
    pairs = np.array(walker.structure.pairs, np.int64).reshape(-1, 2)
    counts = [np.diff(firsts(side))[pairs[:, k]] for k, side in enumerate(sides)]
    together = np.diff(np.array(walker.starts, np.int64))
    for position in np.flatnonzero((counts[0] > together) | (counts[1] > together)).tolist():
        paired = [set(rows) for rows in zip(*walker.rows[walker.starts[position] : walker.starts[position + 1]])] or [set(), set()]
        for k, side in enumerate(sides):
            op = int(pairs[position, k])
            if not counts[1 - k][position] and sides[1 - k].problems:
                continue  # the other record was damaged and left out, which is said
            if not (side.ops[op].endswith(".forward") or ".forward." in side.ops[op]):
                continue
            more = (row for row in side.rows(op) if side.role[row] == OUTPUT and side.dtype[row] is not None and row not in paired[k])
            one_sided[k].extend(side.name[row] for row in more)
    return one_sided


def out_of_order(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of matched records as few as possible without which the others stand in one order on both sides.

    >>> out_of_order([(0, 0), (1, 2), (2, 1), (3, 3)])
    [(1, 2)]

    Args:
        pairs: records of the target and of the golden side, by their places in the files.
    """
    ordered = sorted(pairs)
    ends: list[int] = []
    """Of each length: the place in `ordered` where an ascending row of so many ends earliest on the golden side, and there `lasts`."""
    lasts: list[int] = []
    before = [-1] * len(ordered)
    for place, (_, golden_op) in enumerate(ordered):
        length = bisect_left(lasts, golden_op)
        if length == len(lasts):
            lasts.append(golden_op)
            ends.append(place)
        else:
            lasts[length], ends[length] = golden_op, place
        before[place] = ends[length - 1] if length else -1
    kept = set()
    place = ends[-1] if ends else -1
    while place >= 0:
        kept.add(place)
        place = before[place]
    return [pair for place, pair in enumerate(ordered) if place not in kept]
