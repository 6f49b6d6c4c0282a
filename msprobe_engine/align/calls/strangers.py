"""Calls that were matched with others than their partners: told by the shapes of what they take in and give out, and by its numbers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from msprobe_engine.align.calls.call_pairs import CallPairs
from msprobe_engine.align.calls.call_tree import Kind, Tree, calls_function
from msprobe_engine.core.operator_traits import CASTS, MOVES
from msprobe_engine.formats.dump.dump_table import INPUT
from msprobe_engine.measure.distances import Floats

NEAR = 1e-3
"""Largest and smallest element and norm of two tensors that are the same but for round-off, in parts of the largest of them."""

ROUNDED = 0.1
"""Likewise of tensors with few bits, where others are much further apart."""

_MUCH = 4
"""So many times as far."""


def part_modules_of_parts(pairs: CallPairs) -> None:
    """A module that one side calls once and the other one part by part inside of the same call (an activation of all experts' tokens, or of
    those of each): its calls take in tensors of other shapes and are no partners, nor is what is called in them. What is made of their
    results is compared."""
    target, golden = pairs.target, pairs.golden
    target_forms, golden_forms = pairs.forms
    parted: set[int] = set()
    for i, j in sorted(pairs.found.items(), reverse=True):  # a module ends behind the calls in it
        kind, around = target.kinds[i], (target.parents[i], golden.parents[j])
        of_parts = (
            len(kind) == 4
            and kind[0] == "forward"
            and kind == golden.kinds[j]
            and target_forms[i] != golden_forms[j]
            and pairs.found.get(around[0]) == around[1]
            and _calls_inside(target, around[0], kind) != _calls_inside(golden, around[1], kind)
        )
        if of_parts or around[0] in parted:
            parted.add(i)
            pairs.drop_with_twins(i, j)


def _calls_inside(tree: Tree, op: int, kind: Kind) -> int:
    """How many calls of a kind a call makes."""
    return sum(tree.kinds[child] == kind for child in tree.children.get(op, ()))


def part_strangers(pairs: CallPairs) -> None:
    """A call of a function that takes in tensors of other shapes only, from calls that do not belong together, is another call: both
    sides have one more of it, at different places. So is one that has none of the calls inside that the other one has, and one that is
    given a dtype where the other one is given a device (``to``)."""
    target_forms, golden_forms = pairs.forms
    target, golden = pairs.target.side, pairs.golden.side
    for i, j in list(pairs.found.items()):
        if not calls_function(pairs.target.kinds[i]):
            continue
        if pairs.target.kinds[i][-1] == "to" and _is_cast(pairs.target, i) != _is_cast(pairs.golden, j):
            pairs.drop_with_twins(i, j)
            continue
        if target_forms[i] == golden_forms[j]:
            continue
        rows = [
            (target_row, golden_row)
            for target_row, golden_row in zip(target.rows(i), golden.rows(j))
            if target.role[target_row] == golden.role[golden_row] == INPUT
        ]
        shapes = [(target.shape[target_row], golden.shape[golden_row]) for target_row, golden_row in rows]
        inside = pairs.target.children.get(i, ()), pairs.golden.children.get(j, ())
        if all(inside) and not any(pairs.found.get(child) in inside[1] for child in inside[0]):
            pairs.drop_with_twins(i, j)
            continue
        if any(in_target and in_target == in_golden for in_target, in_golden in shapes):
            continue
        sources = [(pairs.target.producers.get(target_row), pairs.golden.producers.get(golden_row)) for target_row, golden_row in rows]
        other_dimensions = any(
            isinstance(in_target, list) and isinstance(in_golden, list) and in_target and in_golden and len(in_target) != len(in_golden)
            for in_target, in_golden in shapes
        )
        known = [
            (in_target, in_golden)
            for in_target, in_golden in sources
            if not {in_target, in_golden} <= {None} and (other_dimensions or None not in (in_target, in_golden))
        ]
        if known and all(in_target is None or pairs.found.get(in_target) != in_golden for in_target, in_golden in known):
            pairs.drop_with_twins(i, j)


def _is_cast(tree: Tree, op: int) -> bool | None:
    """A call is given a dtype as text (or a device); None: neither."""
    texts = [value for row in tree.side.rows(op) if isinstance(value := tree.side.values.get(row), str)]
    return texts[0].startswith("torch.") if texts else None


def part_other_forms(pairs: CallPairs) -> None:
    """A call of a function that gives a result of another shape, next to calls that one side alone makes, is another call: two products
    on one side are one product of weights put together on the other, an index has the form that the function behind it wants."""
    target_forms, golden_forms = pairs.forms
    odd = [
        (i, j)
        for i, j in pairs.found.items()
        if target_forms[i] != golden_forms[j]
        and calls_function(pairs.target.kinds[i])
        and _sizes(pairs.target.shapes(i).outputs) != _sizes(pairs.golden.shapes(j).outputs)
    ]
    while odd:
        near = [pair for pair in odd if _beside_strangers(pairs, *pair) or _only_for_strangers(pairs, *pair, odd)]
        for i, j in near:
            if i in pairs.found:
                pairs.drop_with_twins(i, j)
        odd = [pair for pair in odd if pair[0] in pairs.found] if near else []


def part_between_strangers(pairs: CallPairs) -> None:
    """Behind the backward pass, two calls that take in nothing but what calls of one side alone give, and that nothing but such calls goes
    on with, are steps of two different ways (to the norm of all gradients): what both ways come to is compared."""
    target, golden = pairs.target, pairs.golden
    for i, j in list(pairs.found.items()):
        if i <= target.last_backward or j <= golden.last_backward or not calls_function(target.kinds[i]):
            continue
        if _is_between(target, i, pairs.found) and _is_between(golden, j, pairs.back):
            pairs.drop_with_twins(i, j)


def _is_between(tree: Tree, op: int, matched: Collection[int]) -> bool:
    """All calls that give a call its tensors, and all that take in its result, have no partner."""
    sources, users = [tree.producers.get(row) for row in tree.tensors_in(op)], tree.users.get(op, ())
    return bool(sources) and bool(users) and all(call is not None and call not in matched for call in (*sources, *users))


def are_of_two_ways(target: Tree, i: int, golden: Tree, j: int, matched: tuple[Collection[int], Collection[int]]) -> bool:
    """Two calls of one function that have no partner belong to two different ways to one result, by the rules above.

    Args:
        matched: calls of the target and of the golden side that have a partner.
    """
    if target.kinds[i][-1] == "to" and _is_cast(target, i) != _is_cast(golden, j):
        return True
    return _is_between(target, i, matched[0]) and _is_between(golden, j, matched[1])


def _only_for_strangers(pairs: CallPairs, i: int, j: int, odd: Collection[tuple[int, int]]) -> bool:
    """Of calls that only move or cast elements: what they give is taken in by calls without a partner, and besides by none but others of
    another form (`odd`)."""
    if pairs.target.kinds[i][-1] not in MOVES | CASTS:
        return False
    for tree, op, matched, side in ((pairs.target, i, pairs.found, 0), (pairs.golden, j, pairs.back, 1)):
        users, other_forms = tree.users.get(op, ()), {pair[side] for pair in odd}
        if all(user in matched for user in users) or any(user in matched and user not in other_forms for user in users):
            return False
    return True


def _beside_strangers(pairs: CallPairs, i: int, j: int) -> bool:
    """A tensor of another shape that one of two calls takes in was given by a call without a partner."""
    target, golden = pairs.target.side, pairs.golden.side
    target_rows, golden_rows = pairs.target.tensors_in(i), pairs.golden.tensors_in(j)
    if len(target_rows) != len(golden_rows):  # one of many is missing
        return False
    for target_row, golden_row in zip(target_rows, golden_rows):
        if target.shape[target_row] != golden.shape[golden_row]:
            target_source, golden_source = pairs.target.producers.get(target_row), pairs.golden.producers.get(golden_row)
            if (target_source is not None and target_source not in pairs.found) or (
                golden_source is not None and golden_source not in pairs.back
            ):
                return True
    return False


def match_by_numbers(pairs: CallPairs, one_batch: bool) -> None:
    """Two calls that take in other numbers, from calls that do not belong together (or from none that is known: a compiled block), may
    each be another one of several of their kind. Where one of those, alone on its side, takes in the numbers that the partner does, it
    is the partner's.

    Args:
        one_batch: the sides are whole runs; the numbers of pieces of two layouts are those of different parts of the batch.
    """
    free = _alone(pairs.target, pairs.found, pairs.forms[0]), _alone(pairs.golden, pairs.back, pairs.forms[1])
    if not any(free):
        return
    todo = list(pairs.found)
    while todo:  # who loses a partner may be that of another one
        changed = {key for i in todo if (key := _change_to_nearer(pairs, i, free, one_batch)) is not None}
        todo = [i for i in pairs.found if (pairs.target.kinds[i], pairs.forms[0][i]) in changed] if changed else []


def _change_to_nearer(
    pairs: CallPairs, i: int, free: tuple[dict[Hashable, _Alone], dict[Hashable, _Alone]], one_batch: bool
) -> Hashable | None:
    """Give a call, or its partner, another one, see `match_by_numbers`; returns the kind and shapes of a call that has another partner."""
    key, j = (pairs.target.kinds[i], pairs.forms[0][i]), pairs.found.get(i)
    target_alone, golden_alone = free[0].get(key), free[1].get(key)
    if j is None or not (target_alone or golden_alone) or _from_partners(pairs, i, j):
        return None
    taken, golden_taken = _taken(pairs.target, i), _taken(pairs.golden, j)
    apart = float(_distances(taken, golden_taken[None])[0])
    if apart <= NEAR:
        return None
    limit = max(NEAR, min(ROUNDED, apart / _MUCH)) if one_batch else NEAR  # the same numbers; or, of one batch, much nearer ones
    if golden_alone and (place := golden_alone.nearest(taken, limit)) is not None:
        _change_partner(pairs, i, golden_alone.exchange(place, j, golden_taken))
    elif one_batch and target_alone and (place := target_alone.nearest(golden_taken, limit)) is not None:
        _change_partner(pairs, target_alone.exchange(place, i, taken), j)
    else:
        return None
    return key


@dataclass
class _Alone:
    """Calls of one kind, with tensors of the same shapes, that have no partner.

    Attributes:
        calls: the records.
        taken: float64 (calls, tensors, 3), see `_taken`.
    """

    calls: list[int]
    taken: Floats

    def nearest(self, taken: Floats, limit: float) -> int | None:
        """The place of the one call that takes in numbers this near, and much nearer ones than all others; None: there is none."""
        distances = _distances(taken, self.taken)
        first = int(distances.argmin())
        near = distances <= max(NEAR, _MUCH * distances[first])
        return first if distances[first] <= limit and near.sum() == 1 else None

    def exchange(self, place: int, call: int, taken: Floats) -> int:
        """Take a call out, and put another one in its place, which takes in other numbers of tensors (no number is near it) or as many."""
        out, self.calls[place] = self.calls[place], call
        self.taken[place] = taken if taken.shape == self.taken.shape[1:] else np.nan
        return out


def _sources(pairs: CallPairs, i: int, j: int) -> Iterator[tuple[int | None, int | None]]:
    """The calls that gave out what two calls take in, place by place."""
    for target_row, golden_row in zip(pairs.target.tensors_in(i), pairs.golden.tensors_in(j)):
        yield pairs.target.producers.get(target_row), pairs.golden.producers.get(golden_row)


def _alone(tree: Tree, matched: Collection[int], forms: Sequence[int]) -> dict[Hashable, _Alone]:
    """Forward calls of functions without a partner, by kind and shapes."""
    calls: dict[Hashable, list[int]] = {}
    for op, kind in enumerate(tree.kinds):
        if op not in matched and calls_function(kind):
            calls.setdefault((kind, forms[op]), []).append(op)
    return {key: _Alone(ops, np.stack([_taken(tree, op) for op in ops])) for key, ops in calls.items()}


def _from_partners(pairs: CallPairs, i: int, j: int) -> bool:
    """What two calls take in was given by calls that belong together, or is compared with nothing."""
    return all(
        target_source is not None and pairs.found.get(target_source) == golden_source
        for target_source, golden_source in _sources(pairs, i, j)
    )


def _change_partner(pairs: CallPairs, i: int, j: int) -> None:
    """Match two calls, and their backward calls, in place of those they were matched with."""
    target_twin, golden_twin = pairs.target.twin(i), pairs.golden.twin(j)
    pairs.pair(i, j)
    if target_twin is not None and golden_twin is not None:
        pairs.pair(target_twin, golden_twin)


def _taken(tree: Tree, op: int) -> Floats:
    """float64 (tensors, 3), extremes and norms of what a call takes in."""
    return tree.side.stats[tree.tensors_in(op)][:, [0, 1, 3]]


def _distances(taken: Floats, others: Floats) -> Floats:
    """float64 (calls,), how far the extremes and norms of what a call takes in are from those of what others do, (calls, tensors, 3), in
    parts of the largest of them; inf where they take in other numbers of tensors."""
    if not len(taken) or taken.shape != others.shape[1:]:
        return np.full(len(others), np.inf)
    with np.errstate(all="ignore"):
        scale = np.maximum(np.abs(others), np.abs(taken)).max(2)
        apart = np.where(scale > 0, np.abs(others - taken).max(2) / np.where(scale > 0, scale, 1.0), 0.0)
    return np.asarray(np.nan_to_num(apart, nan=np.inf).max(1))


def _sizes(forms: Sequence[object]) -> list[object]:
    """The shapes of (dtype, shape) of tensors."""
    return [form[1] for form in forms if isinstance(form, tuple)]
