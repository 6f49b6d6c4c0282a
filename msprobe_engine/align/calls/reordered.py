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
    for mine, theirs in _loops(pairs):
        for numbers, i in mine.items():
            _pair_call_and_its_users(pairs, i, theirs[numbers], back)
    for j, i in list(back.items()):
        x, y = pairs.target.twin(i), pairs.golden.twin(j)
        if x is not None and y is not None:
            back[y] = x
    moved = set(back.values())
    for i, j in list(pairs.found.items()):
        if i in moved or j in back:
            pairs.drop(i)
    for j, i in back.items():
        pairs.pair(i, j)


def _loops(pairs: CallPairs) -> Iterator[tuple[dict[Numbers, int], dict[Numbers, int]]]:
    """Of each loop that two sides go through in different orders: the numbers that a call is given -> the call."""
    for a, b in [(ROOT, ROOT), *pairs.found.items()]:
        inside = pairs.target.children.get(a, ()), pairs.golden.children.get(b, ())
        if not all(inside):
            continue
        mine, theirs = (_by_kind(tree, ops) for tree, ops in zip((pairs.target, pairs.golden), inside))
        for kind in mine.keys() & theirs.keys():
            loops = _loop(pairs.target, mine[kind]), _loop(pairs.golden, theirs[kind])
            if loops[0] and loops[0].keys() == loops[1].keys() and [*loops[0]] != [*loops[1]]:
                yield loops


def _by_kind(tree: Tree, ops: Sequence[int]) -> dict[Kind, list[int]]:
    """Forward calls of functions."""
    found: dict[Kind, list[int]] = {}
    for op in ops:
        if calls_function(tree.kinds[op]):
            found.setdefault(tree.kinds[op], []).append(op)
    return found


def _loop(tree: Tree, ops: Sequence[int]) -> dict[Numbers, int]:
    """Calls by the integers that they are given, in order, where each is given others and all take in the same tensors; else empty."""
    found: dict[Numbers, int] = {}
    taken: set[tuple[bytes, ...]] = set()
    for op in ops:
        values = [tree.side.values.get(row) for row in tree.side.rows(op) if tree.side.role[row] == INPUT and row in tree.side.values]
        numbers = tuple(value for value in values if isinstance(value, int) and not isinstance(value, bool))
        taken.add(tuple(tree.side.stats[row].tobytes() for row in tree.tensors_in(op) if row not in tree.side.values))
        if not numbers or numbers in found or len(taken) > 1:
            return {}
        found[numbers] = op
    return found


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
        mine, theirs = (_users(tree, op) for tree, op in ((pairs.target, i), (pairs.golden, j)))
        todo += [pair for kind in mine for pair in zip(mine[kind], theirs.get(kind, ())) if len(mine[kind]) == len(theirs[kind])]


def _users(tree: Tree, op: int) -> dict[Kind, list[int]]:
    """Calls of functions, by kind, that take in what a call inside of the same module gives."""
    found: dict[Kind, list[int]] = {}
    for user in tree.users.get(op, ()):
        if tree.parents[user] == tree.parents[op] and calls_function(tree.kinds[user]):
            found.setdefault(tree.kinds[user], []).append(user)
    return found
