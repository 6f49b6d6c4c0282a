"""Which parameter a call of the update belongs to.

Ranks of different layouts update their parameters in different orders: stage after stage, chunk after chunk, experts apart from the
rest. The numbers of a tensor tell whose it is: modules show their parameters, and the gradients of them, by name; what is added to a
buffer of gradients, scaled, or updated in place belongs to the same parameter as what goes in.

The updates of several ranks are read as that of one: what one process does for all parameters before it goes on to something else is done
for the parameters of one rank after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msprobe_engine.align.calls.call_tree import Kind, Tree, calls_function
from msprobe_engine.align.calls.longest_common import align
from msprobe_engine.align.calls.strangers import are_of_two_ways
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.align.parameters.prefixes import strip_wrappers
from msprobe_engine.formats.dump.dump_table import OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable

Owner = tuple[str, str]
"""(path of the module, name of the parameter)."""

Mark = tuple[bytes, tuple[int, ...]]
"""What a tensor is known by: its statistics and its shape."""


def mark(side: DumpTable, row: int) -> Mark | None:
    """What a tensor is known by; None of single numbers, of zeros and of what has no statistics."""
    shape = side.shape[row]
    if not isinstance(shape, list) or math.prod(shape) < 2 or not side.numbers[4 * row + 3] > 0:
        return None
    return side.numbers[4 * row : 4 * row + 4].tobytes(), tuple(shape)


def owners(tree: Tree, users: Mapping[int, str] | None = None) -> dict[int, Owner]:
    """Record -> its parameter, of calls that no module makes, and of gradients that are added to a buffer.

    Args:
        users: of a dump without modules, calls that take in parameters or give out gradients -> the name to know them by.
    """
    return owners_and_tensors(tree, users)[0]


def owners_and_tensors(tree: Tree, users: Mapping[int, str] | None = None) -> tuple[dict[int, Owner], dict[Mark, Owner | None]]:
    """`owners`, and what a tensor is known by -> its parameter, also of one in a list of many (``foreach``); None: those of several."""
    side = tree.side
    known: dict[Mark, Owner | None] = {}
    for op, kind in enumerate(tree.kinds):
        if len(kind) == 4:
            _learn_named_owners(side, op, kind, known)
        elif users and op in users:
            for row in side.rows(op):
                place = side.name[row][len(side.ops[op]) + 1 :]
                if place.startswith("output.") if kind[0] == "backward" else tree.takes_parameter(row):
                    _learn_owner(known, mark(side, row), (users[op], place))
    calls = [(op, marks) for op in range(tree.first_backward, len(side.ops)) if _is_update(tree, op) and (marks := _marks(side, op))]
    of_lists = {op for op, _ in calls if _takes_list(side, op)}
    owned: dict[int, Owner] = {}
    for ordered_calls in (calls, reversed(calls), calls):  # the call that takes in the parameter itself is often the last one
        for op, marks in ordered_calls:
            if tree.kinds[op][2].startswith("_foreach_") and _hand_on(side, op, known):
                continue
            if op in of_lists:
                continue
            named = {owner for tensor_mark in marks if (owner := known.get(tensor_mark)) is not None}
            if len(named) == 1 or (users and named):
                owner = min(named)  # of a parameter and of its gradient
                owned[op] = owner
                shapes = {tensor_mark[1] for tensor_mark in marks if known.get(tensor_mark) == owner}
                known.update((tensor_mark, owner) for tensor_mark in marks if tensor_mark not in known and tensor_mark[1] in shapes)
    return owned, known


def _hand_on(side: DumpTable, op: int, known: dict[Mark, Owner | None]) -> bool:
    """What one call makes of the tensors of a list belongs to the same parameters, one by one (gradients that are clipped). Returns True
    where it gives as many tensors of their shapes."""
    start = f"{side.ops[op]}.input.0."
    taken = [row for row in side.rows(op) if side.name[row].startswith(start)]
    given = [row for row in side.rows(op) if side.role[row] == OUTPUT]
    if [side.shape[row] for row in taken] != [side.shape[row] for row in given]:
        return False
    for taken_row, given_row in zip(taken, given):
        taken_mark, given_mark = mark(side, taken_row), mark(side, given_row)
        if taken_mark is not None and given_mark is not None:
            if given_mark not in known and known.get(taken_mark) is not None:
                known[given_mark] = known[taken_mark]
            elif taken_mark not in known and known.get(given_mark) is not None:
                known[taken_mark] = known[given_mark]
    return bool(taken)


def _is_update(tree: Tree, op: int) -> bool:
    """A call of a function that no module makes, or that writes in place."""
    kind = tree.kinds[op]
    if not calls_function(kind) or kind[1] == "Distributed":
        return False
    return _in_place(kind[2]) or not any(len(tree.kinds[above]) == 4 for above in tree.above(op))


def _takes_list(side: DumpTable, op: int) -> bool:
    """A call takes in several tensors in one list (buckets are made so): they are of several parameters, and what it gives is of no one."""
    inputs = (side.name[row][len(side.ops[op]) + 1 :].split(".") for row in side.rows(op) if mark(side, row) is not None)
    lists = Counter(tuple(place[:-1]) for place in inputs if len(place) > 2 and place[0] == "input")
    return any(count > 1 for count in lists.values())


def _marks(side: DumpTable, op: int) -> list[Mark]:
    return [tensor_mark for tensor_mark in (mark(side, row) for row in side.rows(op)) if tensor_mark is not None]


def owner_of(side: DumpTable, row: int, kind: Kind) -> Owner:
    """The parameter that a row of a module's record is of, or the gradient of, whatever is around the model; `kind`: of the record."""
    return strip_wrappers(kind[2]), side.name[row][len(side.ops[side.op[row]]) + 1 :].removeprefix("parameters.")


def _learn_named_owners(side: DumpTable, op: int, kind: Kind, known: dict[Mark, Owner | None]) -> None:
    """What the record of a module shows by name."""
    for row in side.rows(op):
        if side.role[row] in (PARAMETERS, PARAMETERS_GRAD):
            _learn_owner(known, mark(side, row), owner_of(side, row, kind))


def _learn_owner(known: dict[Mark, Owner | None], tensor_mark: Mark | None, owner: Owner) -> None:
    """Equal tensors of two parameters tell nothing."""
    if tensor_mark is not None:
        known[tensor_mark] = owner if known.get(tensor_mark, owner) == owner else None


def _in_place(call: str) -> bool:
    return call.endswith("_") and not call.startswith("__")


def rematch_by_owner(
    structure: Structure,
    target: Tree,
    golden: Tree,
    target_users: Mapping[int, str] | None = None,
    golden_users: Mapping[int, str] | None = None,
) -> Structure:
    """The same, where calls that belong to a parameter are matched with calls of the same kind for the same parameter.

    Args:
        target_users, golden_users: `users` of `owners`, of two optimizers that go through one parameter after the other; None: they
            may not.
    """
    target_owned, golden_owned = owners(target, target_users), owners(golden, golden_users)
    if target_users is not None:
        target_owned, golden_owned = with_calls_between(target_owned, target), with_calls_between(golden_owned, golden)
    if not set(target_owned.values()) & set(golden_owned.values()):
        return structure
    wanted = _pair_by_owner(target_owned, target, golden_owned, golden)
    taken = set(wanted.values())
    pairs = dict(structure.pairs)
    for i, j in structure.pairs:
        owner, golden_owner = target_owned.get(i), golden_owned.get(j)
        known_apart = owner != golden_owner and (None not in (owner, golden_owner) or not _hold_the_same(target.side, i, golden.side, j))
        if i in wanted or j in taken or known_apart:
            del pairs[i]
    pairs.update(wanted)
    used = set(pairs.values())
    return Structure(
        sorted(pairs.items()),
        [i for i in range(len(target.side.ops)) if i not in pairs],
        [j for j in range(len(golden.side.ops)) if j not in used],
        structure.renamed,
    )


def _hold_the_same(target: DumpTable, i: int, golden: DumpTable, j: int) -> bool:
    """Two calls take in and give out tensors of the same numbers: one of two runs may not know whose they are."""
    marks = _marks(target, i)
    return bool(marks) and marks == _marks(golden, j)


def with_calls_between(owned: Mapping[int, Owner], tree: Tree) -> dict[int, Owner]:
    """Calls of the update between two of one parameter are of that one, too: a moment that is zero in the first step has no mark."""
    extended, between = dict(owned), list[int]()
    last: Owner | None = None
    for op in range(tree.last_backward + 1, len(tree.kinds)):
        owner = owned.get(op)
        if owner is None:
            if tree.kinds[op][1:2] != ("Distributed",):  # what ranks put together is of all parameters
                between.append(op)
            continue
        if owner == last:
            extended.update((call, owner) for call in between)
        last, between = owner, []
    return extended


def in_other_order(structure: Structure, target: Tree, golden: Tree) -> Structure:
    """The same, where both sides have calls of the update alone: their optimizers go through the parameters in other orders."""
    behind = target.last_backward, golden.last_backward
    alone = [
        {tree.kinds[op] for op in ops if op > last}
        for tree, ops, last in zip((target, golden), (structure.only_target, structure.only_golden), behind)
    ]
    if not alone[0] & alone[1]:
        return structure
    target_users = {} if target.has_modules else {i: target.side.ops[i] for i, _ in structure.pairs if i <= behind[0]}
    golden_users = {j: target_users[i] for i, j in structure.pairs if i in target_users}
    rematched = rematch_by_owner(structure, target, golden, target_users, golden_users)
    pairs, unpaired = list(rematched.pairs), dict[Kind, list[int]]()  # calls that nobody knows the parameter of: one after the other
    for j in rematched.only_golden:
        if j > behind[1]:
            unpaired.setdefault(golden.kinds[j], []).append(j)
    used_target, used_golden = {i for i, _ in pairs}, {j for _, j in pairs}
    for i in rematched.only_target:
        if i <= behind[0] or not (candidates := unpaired.get(target.kinds[i])):
            continue
        j = candidates[0]
        if are_of_two_ways(target, i, golden, j, (used_target, used_golden)):
            continue
        pairs.append((i, candidates.pop(0)))
        used_target.add(i)
        used_golden.add(j)
    return Structure(
        sorted(pairs),
        [i for i in rematched.only_target if i not in used_target],
        [j for j in rematched.only_golden if j not in used_golden],
        rematched.renamed,
    )


def _pair_by_owner(target_owned: Mapping[int, Owner], target: Tree, golden_owned: Mapping[int, Owner], golden: Tree) -> dict[int, int]:
    """Calls for the same parameter: the first of a kind and the first of that kind, and so on. Of a kind that one update makes more often
    (a decay is a product, too) those that stand at the same place among the calls of the parameter."""
    pairs: dict[int, int] = {}
    golden_calls = _by_owner(golden_owned)
    for owner, target_ops in _by_owner(target_owned).items():
        golden_ops = golden_calls.get(owner, [])
        target_kinds, golden_kinds = [target.kinds[op] for op in target_ops], [golden.kinds[op] for op in golden_ops]
        alike = Counter(target_kinds) == Counter(golden_kinds)
        in_place = [] if alike else [(target_ops[i], golden_ops[j]) for i, j in align(target_kinds, golden_kinds)]
        for kind in {*target_kinds} & {*golden_kinds}:
            of_kind = [[op for op in ops if tree.kinds[op] == kind] for ops, tree in ((target_ops, target), (golden_ops, golden))]
            if len(of_kind[0]) == len(of_kind[1]):
                pairs.update(zip(*of_kind))
            else:
                pairs.update((i, j) for i, j in in_place if target.kinds[i] == kind)
    return pairs


def _by_owner(owned: Mapping[int, Owner]) -> dict[Owner, list[int]]:
    calls: dict[Owner, list[int]] = {}
    for op, owner in sorted(owned.items()):
        calls.setdefault(owner, []).append(op)
    return calls


_LONGEST = 32
"""Calls that an update makes for one parameter."""


@dataclass(frozen=True)
class Loop:
    """Calls that come again and again.

    Attributes:
        body: what is repeated.
        start, stop: from the first repetition to the end of the last.
    """

    body: tuple[int, ...]
    start: int
    stop: int


def in_turns(lists: Sequence[Sequence[Hashable]]) -> Iterator[tuple[int, range]]:
    """Lists of calls in turns: up to the first loop that all of them have, that loop, up to the next.

    Yields:
        (number of the list, places in it).
    """
    numbers: dict[Hashable, int] = {}
    coded = [[numbers.setdefault(kind, len(numbers)) for kind in some] for some in lists]
    loops_of_lists = [loops(some) for some in coded]
    bodies: dict[tuple[int, ...], int] = {}
    keys = [[bodies.setdefault(loop.body, len(bodies)) for loop in some] for some in loops_of_lists]
    common = keys[0] if keys else []
    for some in keys[1:]:
        common = [common[i] for i, _ in align(common, some)]
    cuts = [_cuts(some, key, common, len(whole)) for some, key, whole in zip(loops_of_lists, keys, coded)]
    for turn in range(2 * len(common) + 1):
        for list_number, places in enumerate(cuts):
            if places[turn] < places[turn + 1]:
                yield list_number, range(places[turn], places[turn + 1])


def _cuts(all_loops: Sequence[Loop], keys: Sequence[int], common: Sequence[int], length: int) -> list[int]:
    """Where the loops that all have begin and end, with the ends of the list."""
    cuts, position = [0], 0
    for key in common:
        position = keys.index(key, position)
        cuts += [all_loops[position].start, all_loops[position].stop]
        position += 1
    return [*cuts, length]


def loops(calls: Sequence[int]) -> list[Loop]:
    """The loops in a list of calls, from its start; of several at one place the one that covers most.

    >>> [(loop.body, loop.start, loop.stop) for loop in loops([9, 1, 2, 1, 2, 1, 2, 3, 3, 3])]
    [((1, 2), 1, 7), ((3,), 7, 10)]
    """
    repeated: list[Loop] = []
    position = 0
    while position < len(calls):
        best, covered = 0, 0
        for size in range(1, min(_LONGEST, (len(calls) - position) // 2) + 1):
            stop = position + size
            while calls[stop : stop + 1] == calls[stop - size : stop - size + 1] and stop < len(calls):
                stop += 1
            times = (stop - position) // size
            if times > 1 and times * size > max(covered, 2):
                best, covered = size, times * size
        if best:
            repeated.append(Loop(tuple(calls[position : position + best]), position, position + covered))
        position += covered or 1
    return repeated
