"""Loops that one side goes through in another order (over experts, over heads): their calls belong together by the number that each is
given, and what is made of their results with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msprobe_engine.align.calls.call_pairs import CallPairs
from msprobe_engine.align.calls.call_tree import ROOT, Kind, Tree, calls_function
from msprobe_engine.core.operator_traits import ACCUMULATIONS
from msprobe_engine.formats.dump.dump_table import INPUT

Numbers = tuple[int, ...]


def match_by_argument(pairs: CallPairs) -> None:
    """Calls inside of one module that take in the same tensor, and each a number of its own, are made with the same numbers on both sides:
    each belongs to the one with its number."""
    back: dict[int, int] = {}  # of the golden side -> of the target
    for target_calls, golden_calls in _loops(pairs):
        for numbers, i in target_calls.items():
            _pair_call_and_its_users(pairs, i, golden_calls[numbers], back)
    for j, i in list(back.items()):
        target_twin, golden_twin = pairs.target.twin(i), pairs.golden.twin(j)
        if target_twin is not None and golden_twin is not None:
            back[golden_twin] = target_twin
    for j, i in back.items():
        pairs.pair(i, j)


def _loops(pairs: CallPairs) -> Iterator[tuple[dict[Numbers, int], dict[Numbers, int]]]:
    """Of each loop that two sides go through in different orders: the numbers that a call is given -> the call."""
    for target_parent, golden_parent in [(ROOT, ROOT), *pairs.found.items()]:
        inside = pairs.target.children.get(target_parent, ()), pairs.golden.children.get(golden_parent, ())
        if not all(inside):
            continue
        target_kinds, golden_kinds = (_by_kind(tree, ops) for tree, ops in zip((pairs.target, pairs.golden), inside))
        for kind in target_kinds.keys() & golden_kinds.keys():
            loops = _loop(pairs.target, target_kinds[kind]), _loop(pairs.golden, golden_kinds[kind])
            if loops[0] and loops[0].keys() == loops[1].keys() and [*loops[0]] != [*loops[1]]:
                yield loops


def _by_kind(tree: Tree, ops: Sequence[int]) -> dict[Kind, list[int]]:
    """Forward calls of functions."""
    calls: dict[Kind, list[int]] = {}
    for op in ops:
        if calls_function(tree.kinds[op]):
            calls.setdefault(tree.kinds[op], []).append(op)
    return calls


def _loop(tree: Tree, ops: Sequence[int]) -> dict[Numbers, int]:
    """Calls by the integers that they are given, in order, where each is given others and all take in the same tensors; else empty."""
    calls: dict[Numbers, int] = {}
    taken: set[tuple[bytes, ...]] = set()
    for op in ops:
        values = [tree.side.values.get(row) for row in tree.side.rows(op) if tree.side.role[row] == INPUT and row in tree.side.values]
        numbers = tuple(value for value in values if isinstance(value, int) and not isinstance(value, bool))
        taken.add(tuple(tree.side.stats[row].tobytes() for row in tree.tensors_in(op) if row not in tree.side.values))
        if not numbers or numbers in calls or len(taken) > 1:
            return {}
        calls[numbers] = op
    return calls


def _pair_call_and_its_users(pairs: CallPairs, i: int, j: int, back: dict[int, int]) -> None:
    """Two calls belong together, and so do the calls of functions in the same module that take in what they give, up to sums of all."""
    todo, moved = [(i, j)], set(back.values())
    while todo:
        i, j = todo.pop()
        if j in back or i in moved:
            continue
        back[j] = i
        moved.add(i)
        if pairs.target.kinds[i][-1] in ACCUMULATIONS:
            continue
        target_users, golden_users = (_users(tree, op) for tree, op in ((pairs.target, i), (pairs.golden, j)))
        todo += [
            pair
            for kind in target_users
            for pair in zip(target_users[kind], golden_users.get(kind, ()))
            if len(target_users[kind]) == len(golden_users[kind])
        ]


def _users(tree: Tree, op: int) -> dict[Kind, list[int]]:
    """Calls of functions, by kind, that take in what a call inside of the same module gives."""
    users: dict[Kind, list[int]] = {}
    for user in tree.users.get(op, ()):
        if tree.parents[user] == tree.parents[op] and calls_function(tree.kinds[user]):
            users.setdefault(tree.kinds[user], []).append(user)
    return users
