"""A batch that one side takes in pieces: calls of both sides that take in parts of the same tensors, cut into other numbers of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import product
from typing import Any

from msprobe_engine.align.calls.call_pairs import CallPairs
from msprobe_engine.align.calls.call_tree import ROOT, Tree, calls_function
from msprobe_engine.formats.dump.dump_table import OUTPUT

Taken = list[tuple[str | None, list[Any]]]
"""dtypes and shapes of the tensors that a call takes in."""


def part_pieces(pairs: CallPairs) -> None:
    """Calls that take in tensors of another size in one dimension are parts of a whole, where those of either side come to the same size:
    a loss over pieces of the tokens, a model that goes through a batch in pieces. What is made of all of them is compared."""
    parted: tuple[set[int], set[int]] = set(), set()
    for target_calls, golden_calls in _calls_of_other_sizes(pairs):
        done: set[Hashable] = set()
        for taken, golden_taken in product(_distinct(target_calls), _distinct(golden_calls)):
            cut = _cut(taken, golden_taken)
            whole = _without_sizes(taken, cut)
            if not cut or whole in done:
                continue
            done.add(whole)
            parts = [[op for op, some in calls.items() if _without_sizes(some, cut) == whole] for calls in (target_calls, golden_calls)]
            sizes = [_whole_sizes([calls[op] for op in ops], cut) for calls, ops in zip((target_calls, golden_calls), parts)]
            if sizes[0] and sizes[0] == sizes[1]:
                _part(pairs, parts[0], parts[1], parted)
    wave = parted[0].copy(), parted[1].copy()
    while all(wave):
        users, wave = _users(pairs, wave), (set(), set())
        for ops, golden_ops in users:
            if ops and golden_ops and not _are_whole(pairs, ops, golden_ops):
                _part(pairs, ops, golden_ops, wave)
        for known, new in zip(parted, wave):
            new -= known
            known |= new


def _part(pairs: CallPairs, ops: Sequence[int], golden_ops: Sequence[int], parted: tuple[set[int], set[int]]) -> None:
    """Part calls, and their backward calls, from whatever they are matched with."""
    for op in ops:
        pairs.drop_target_with_twin(op)
    for op in golden_ops:
        pairs.drop_golden_with_twin(op)
    parted[0].update(ops)
    parted[1].update(golden_ops)


def _users(pairs: CallPairs, parted: tuple[set[int], set[int]]) -> Iterable[tuple[list[int], list[int]]]:
    """Calls of functions that take in what some calls give, by their kinds and places."""
    groups: dict[Hashable, tuple[list[int], list[int]]] = {}
    for side, (tree, ops) in enumerate(zip((pairs.target, pairs.golden), parted)):
        for user in sorted({user for op in ops for user in tree.users.get(op, ()) if calls_function(tree.kinds[user])}):
            groups.setdefault(_place(tree, user), ([], []))[side].append(user)
    return groups.values()


def _are_whole(pairs: CallPairs, ops: Sequence[int], golden_ops: Sequence[int]) -> bool:
    """Calls take in what all pieces come to: each has its partner, of the same form, and none goes on with what another one gives (parts
    of a sum)."""
    forms, golden_forms = pairs.forms
    alike = [pairs.found.get(op) for op in ops] == golden_ops and [forms[op] for op in ops] == [golden_forms[op] for op in golden_ops]
    return alike and not any(user in ops for op in ops for user in pairs.target.users.get(op, ()))


def _place(tree: Tree, op: int) -> Hashable:
    parent = tree.parents[op]
    return tree.kinds[op], () if parent == ROOT else tree.kinds[parent]


def _distinct(calls: dict[int, Taken]) -> list[Taken]:
    """What calls take in, each once."""
    return list({str(taken): taken for taken in calls.values()}.values())


def _calls_of_other_sizes(pairs: CallPairs) -> Iterable[tuple[dict[int, Taken], dict[int, Taken]]]:
    """Of each kind of forward calls inside of a module those of both sides whose partner has tensors of other shapes, or that have none."""
    groups: dict[Hashable, tuple[dict[int, Taken], dict[int, Taken]]] = {}
    forms, golden_forms = pairs.forms
    alike = {i for i, j in pairs.found.items() if forms[i] == golden_forms[j]}
    known: tuple[Collection[int], Collection[int]] = alike, {pairs.found[i] for i in alike}
    for side, (tree, done) in enumerate(zip((pairs.target, pairs.golden), known)):
        for op, kind in enumerate(tree.kinds[: tree.last_backward]):  # pieces of gradients behind it are those of their buffers
            if kind[0] == "forward" and op not in done:
                groups.setdefault(_place(tree, op), ({}, {}))[side][op] = _taken(tree, op)
    return groups.values()


def _taken(tree: Tree, op: int) -> Taken:
    side = tree.side
    rows = (row for row in side.rows(op) if side.role[row] != OUTPUT and row not in side.values)
    return [(side.dtype[row], side.shape[row]) for row in rows if isinstance(side.shape[row], list)]


def _cut(one: Taken, other: Taken) -> tuple[int, ...]:
    """Of each tensor that two calls take in the dimension in which it has another size, -1 for one that has none; nothing where it is more
    than that, or no tensor has one."""
    if len(one) != len(other):
        return ()
    cut = []
    for (dtype, shape), (other_dtype, other_shape) in zip(one, other):
        apart = [place for place, (size, other_size) in enumerate(zip(shape, other_shape)) if size != other_size]
        if dtype != other_dtype or len(shape) != len(other_shape) or len(apart) > 1:
            return ()
        cut.append(apart[0] if apart else -1)
    return tuple(cut) if max(cut, default=-1) >= 0 else ()


def _without_sizes(taken: Taken, cut: Sequence[int]) -> Hashable:
    """What a call takes in, but for the sizes of the dimensions that are cut."""
    forms = zip(taken, cut) if len(taken) == len(cut) else ()
    return tuple((dtype, tuple(size for place, size in enumerate(shape) if place != at), len(shape)) for (dtype, shape), at in forms)


def _whole_sizes(pieces: Sequence[Taken], cut: Sequence[int]) -> list[int]:
    """The sizes that pieces come to; nothing where they are not all but the last of one size (tokens of experts)."""
    sizes = [[shape[at] for (_, shape), at in zip(taken, cut) if at >= 0] for taken in pieces]
    alike = all(size == sizes[0] for size in sizes[:-1]) and all(last <= first for first, last in zip(sizes[0], sizes[-1]))
    return [sum(each) for each in zip(*sizes)] if alike else []
