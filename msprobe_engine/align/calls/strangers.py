"""Calls that were matched with others than their partners: told by the shapes of what they take in and give out, and by its numbers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence

import numpy as np

from msprobe_engine.align.calls.call_pairs import CallPairs
from msprobe_engine.align.calls.call_tree import Tree, calls_function
from msprobe_engine.formats.dump.dump_table import INPUT

NEAR = 1e-3
"""Largest and smallest element and norm of two tensors that are the same but for round-off, in parts of the largest of them."""

ROUNDED = 0.1
"""Likewise of tensors with few bits, where others are much further apart."""


def part_strangers(pairs: CallPairs) -> None:
    """A call of a function that takes in tensors of other shapes only, from calls that do not belong together, is another call: both
    sides have one more of it, at different places. So is one that has none of the calls inside that the other one has, and one that is
    given a dtype where the other one is given a device (``to``)."""
    first, second = pairs.forms
    mine, theirs = pairs.target.side, pairs.golden.side
    back = {j: i for i, j in pairs.found.items()}
    for i, j in list(pairs.found.items()):
        if not calls_function(pairs.target.kinds[i]):
            continue
        if pairs.target.kinds[i][-1] == "to" and _is_cast(pairs.target, i) != _is_cast(pairs.golden, j):
            pairs.drop_with_twins(i, j, back)
            continue
        if first[i] == second[j]:
            continue
        rows = [(x, y) for x, y in zip(mine.rows(i), theirs.rows(j)) if mine.role[x] == theirs.role[y] == INPUT]
        shapes = [(mine.shape[x], theirs.shape[y]) for x, y in rows]
        inside = pairs.target.children.get(i, ()), pairs.golden.children.get(j, ())
        if all(inside) and not any(pairs.found.get(child) in inside[1] for child in inside[0]):
            pairs.drop_with_twins(i, j, back)
            continue
        if any(a and a == b for a, b in shapes):
            continue
        sources = [(pairs.target.producers.get(x), pairs.golden.producers.get(y)) for x, y in rows]
        other = any(isinstance(a, list) and isinstance(b, list) and a and b and len(a) != len(b) for a, b in shapes)
        known = [(a, b) for a, b in sources if not {a, b} <= {None} and (other or None not in (a, b))]
        if known and all(a is None or pairs.found.get(a) != b for a, b in known):
            pairs.drop_with_twins(i, j, back)


def _is_cast(tree: Tree, op: int) -> bool | None:
    """A call is given a dtype as text (or a device); None: neither."""
    texts = [value for row in tree.side.rows(op) if isinstance(value := tree.side.values.get(row), str)]
    return texts[0].startswith("torch.") if texts else None


def part_other_forms(pairs: CallPairs) -> None:
    """A call of a function that gives a result of another shape, next to calls that one side alone makes, is another call: two products
    on one side are one product of weights put together on the other."""
    first, second = pairs.forms
    back = {j: i for i, j in pairs.found.items()}
    odd = [
        (i, j)
        for i, j in pairs.found.items()
        if first[i] != second[j]
        and calls_function(pairs.target.kinds[i])
        and _sizes(pairs.target.shapes(i).outputs) != _sizes(pairs.golden.shapes(j).outputs)
    ]
    while odd:
        near = [pair for pair in odd if _beside_strangers(pairs, *pair)]
        for i, j in near:
            if i in pairs.found:
                pairs.drop_with_twins(i, j, back)
        odd = [pair for pair in odd if pair[0] in pairs.found] if near else []


def part_between_strangers(pairs: CallPairs) -> None:
    """Behind the backward pass, two calls that take in nothing but what calls of one side alone give, and that nothing but such calls goes
    on with, are steps of two different ways (to the norm of all gradients): what both ways come to is compared."""
    mine, theirs = pairs.target, pairs.golden
    back = {j: i for i, j in pairs.found.items()}
    for i, j in list(pairs.found.items()):
        if i <= mine.last_backward or j <= theirs.last_backward or not calls_function(mine.kinds[i]):
            continue
        if _is_between(mine, i, pairs.found) and _is_between(theirs, j, pairs.used):
            pairs.drop_with_twins(i, j, back)


def _is_between(tree: Tree, op: int, matched: Collection[int]) -> bool:
    """All calls that give a call its tensors, and all that take in its result, have no partner."""
    sources, users = [tree.producers.get(row) for row in tree.tensors_in(op)], tree.users.get(op, ())
    return bool(sources) and bool(users) and all(one is not None and one not in matched for one in (*sources, *users))


def _beside_strangers(pairs: CallPairs, i: int, j: int) -> bool:
    """A tensor of another shape that one of two calls takes in was given by a call without a partner."""
    mine, theirs = pairs.target.side, pairs.golden.side
    taken, others = pairs.target.tensors_in(i), pairs.golden.tensors_in(j)
    if len(taken) != len(others):  # one of many is missing
        return False
    for x, y in zip(taken, others):
        if mine.shape[x] != theirs.shape[y]:
            a, b = pairs.target.producers.get(x), pairs.golden.producers.get(y)
            if (a is not None and a not in pairs.found) or (b is not None and b not in pairs.used):
                return True
    return False


def match_by_numbers(pairs: CallPairs, one_batch: bool) -> None:
    """Two calls that take in other numbers, from calls that do not belong together (or from none that is known: a compiled block), may
    each be another one of several of their kind. Where one of those, alone on its side, takes in the numbers that the partner does, it
    is the partner's.

    Args:
        one_batch: the sides are whole runs; the numbers of pieces of two layouts are those of different parts of the batch.
    """
    free = _alone(pairs, pairs.target, pairs.found, 0), _alone(pairs, pairs.golden, pairs.used, 1)
    if not any(free):
        return
    for i, j in list(pairs.found.items()):
        kind = pairs.target.kinds[i]
        key = kind, pairs.forms[0][i]
        mine, theirs = free[0].get(key, []), free[1].get(key, [])
        if pairs.found.get(i) != j or not (mine or theirs) or _from_partners(pairs, i, j) or _distance(pairs, i, j) <= NEAR:
            continue
        better = [other for other in theirs if _is_nearer(pairs, (i, other), (i, j), one_batch)]
        if len(better) == 1:
            _change_partner(pairs, i, better[0])
            theirs[theirs.index(better[0])] = j
            continue
        others = [other for other in mine if one_batch and _is_nearer(pairs, (other, j), (i, j), one_batch)]
        if len(others) == 1:
            _change_partner(pairs, others[0], j)
            mine[mine.index(others[0])] = i


def _sources(pairs: CallPairs, i: int, j: int) -> Iterator[tuple[int | None, int | None]]:
    """The calls that gave out what two calls take in, place by place."""
    for x, y in zip(pairs.target.tensors_in(i), pairs.golden.tensors_in(j)):
        yield pairs.target.producers.get(x), pairs.golden.producers.get(y)


def _alone(pairs: CallPairs, tree: Tree, matched: Collection[int], which: int) -> dict[Hashable, list[int]]:
    """Forward calls of functions without a partner, by kind and shapes."""
    found: dict[Hashable, list[int]] = {}
    for op, kind in enumerate(tree.kinds):
        if op not in matched and calls_function(kind):
            found.setdefault((kind, pairs.forms[which][op]), []).append(op)
    return found


def _from_partners(pairs: CallPairs, i: int, j: int) -> bool:
    """What two calls take in was given by calls that belong together, or is compared with nothing."""
    return all(a is not None and pairs.found.get(a) == b for a, b in _sources(pairs, i, j))


def _is_nearer(pairs: CallPairs, pair: tuple[int, int], than: tuple[int, int], one_batch: bool) -> bool:
    """One pair takes in the same numbers; or, of one batch, much nearer ones than another pair."""
    distance = _distance(pairs, *pair)
    return distance <= NEAR or (one_batch and distance <= min(ROUNDED, _distance(pairs, *than) / 4))


def _change_partner(pairs: CallPairs, i: int, j: int) -> None:
    """Match two calls, and their backward calls, in place of those they were matched with."""
    back = {other: op for op, other in pairs.found.items()}
    wanted = [(i, j)]
    x, y = pairs.target.twin(i), pairs.golden.twin(j)
    if x is not None and y is not None:
        wanted.append((x, y))
    for op, other in wanted:
        if op in pairs.found:
            back.pop(pairs.found[op], None)
            pairs.drop(op)
        if other in back:
            pairs.drop(back.pop(other))
        pairs.pair(op, other)


def _distance(pairs: CallPairs, i: int, j: int) -> float:
    """How far the extremes and norms of what two calls take in are apart, in parts of the largest of them; inf where they take in
    other numbers of tensors."""
    mine, theirs = pairs.target.tensors_in(i), pairs.golden.tensors_in(j)
    if len(mine) != len(theirs) or not mine:
        return np.inf
    a, b = pairs.target.side.stats[mine][:, [0, 1, 3]], pairs.golden.side.stats[theirs][:, [0, 1, 3]]
    with np.errstate(all="ignore"):
        scale = np.maximum(np.abs(a), np.abs(b)).max(1)
        apart = np.where(scale > 0, np.abs(a - b).max(1) / np.where(scale > 0, scale, 1.0), 0.0)
    return float(np.nan_to_num(apart, nan=np.inf).max())


def _sizes(forms: Sequence[object]) -> list[object]:
    """The shapes of (dtype, shape) of tensors."""
    return [form[1] for form in forms if isinstance(form, tuple)]
