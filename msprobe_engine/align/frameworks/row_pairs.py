"""The rows of a group, paired: what goes in, parameters, what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from msprobe_engine.align.frameworks.canonical import Terms, near, of_row
from msprobe_engine.align.frameworks.groups import Group
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD

_MOST = 5
"""Tensors of one size whose order is looked for."""


@dataclass(frozen=True)
class Joined:
    """Rows that belong together: of one side several, when they make one tensor of the other."""

    role: int
    mine: tuple[int, ...]
    theirs: tuple[int, ...]


def rows_of(first: Terms, second: Terms, group: Group) -> list[Joined]:
    """The rows of a group; rows that nothing belongs to are left out."""
    sides, ops = (first, second), (group.mine, group.theirs)
    found: list[Joined] = []
    entering = [_entering(side, some) for side, some in zip(sides, ops)]
    found += _paired(first, second, INPUT, entering[0], entering[1])
    found += _arguments(first, second, group)
    for role in (PARAMETERS, PARAMETERS_GRAD):
        found += _by_name(first, second, role, group)
    leaving = [_leaving(side, some) for side, some in zip(sides, ops)]
    back = first.direction(group.mains[0]) == "backward"
    return found + _paired(first, second, OUTPUT, leaving[0], leaving[1], sums=back)


def _arguments(first: Terms, second: Terms, group: Group) -> list[Joined]:
    """Arguments that are no tensors: those of equal place and value, and numbers with a point in the order in which they stand."""
    sides, ops = (first, second), (group.mine, group.theirs)
    rows = [[row for op in some for row in side.plain(op)] for side, some in zip(sides, ops)]
    free = {(second.place(row), second.value(row)): row for row in reversed(rows[1])}
    found = []
    for row in rows[0]:
        other = free.pop((first.place(row), first.value(row)), None)
        if other is not None:
            found.append(Joined(first.side.role[row], (row,), (other,)))
    floats = [[row for row in some if type(side.side.values.get(row)) is float] for side, some in zip(sides, rows)]
    used = [{one.mine[0] for one in found}, {one.theirs[0] for one in found}]
    left = [[row for row in some if row not in taken] for some, taken in zip(floats, used)]
    if len(left[0]) == len(left[1]):
        found += [Joined(INPUT, (a,), (b,)) for a, b in zip(*left)]
    return found


def _entering(side: Terms, ops: Sequence[int]) -> list[int]:
    """Tensors that go in from outside, each once."""
    if len(ops) == 1:
        return side.rows(ops[0], INPUT)
    made = [row for op in ops for row in side.rows(op, OUTPUT)]
    found: list[int] = []
    for op in ops:
        for row in side.rows(op, INPUT):
            if not any(side.same(row, other) for other in (*(m for m in made if side.side.op[m] != op), *found)):
                found.append(row)
    return found


def _leaving(side: Terms, ops: Sequence[int]) -> list[int]:
    """Tensors that come out and do not go into another call of the group."""
    if len(ops) == 1:
        return side.rows(ops[0], OUTPUT)
    taken = [row for op in ops for row in side.rows(op, INPUT)]
    found = []
    for op in ops:
        for row in side.rows(op, OUTPUT):
            if not any(side.same(row, other) for other in taken if side.side.op[other] > op):
                found.append(row)
    return found


def _by_name(first: Terms, second: Terms, role: int, group: Group) -> list[Joined]:
    """Parameters by what they are called; of several modules those of one name together."""
    names: list[dict[str, list[int]]] = [{}, {}]
    for side, ops, found in zip((first, second), (group.mine, group.theirs), names):
        for op in ops:
            for row in side.rows(op, role):
                found.setdefault(of_row(side, row, side.side.ops[op]), []).append(row)
    joined = []
    for name in [name for name in names[0] if name in names[1]]:
        joined += _paired(first, second, role, names[0].pop(name), names[1].pop(name))
    rest = [[row for rows in found.values() for row in rows] for found in names]
    return joined + _paired(first, second, role, rest[0], rest[1])


def _paired(first: Terms, second: Terms, role: int, mine: list[int], theirs: list[int], sums: bool = False) -> list[Joined]:
    """By size; of one size in order, unless the numbers say another order.

    `sums`: where one side has more of them, they may be parts of what the other side has as a sum; then the numbers decide.
    """
    found = []
    left: list[list[int]] = [[], []]
    sizes = [first.size(row) for row in mine] + [second.size(row) for row in theirs]
    for size in dict.fromkeys(sizes):
        a = [row for row in mine if first.size(row) == size]
        b = [row for row in theirs if second.size(row) == size]
        pairs = _ordered(first, second, a, b)
        if sums and len(a) != len(b):
            pairs = [pair for pair in pairs if _near(first, second, pair)]
        found += [Joined(role, (x,), (y,)) for x, y in pairs]
        left[0] += [row for row in a if row not in {x for x, _ in pairs}]
        left[1] += [row for row in b if row not in {y for _, y in pairs}]
    for at, (side, other) in enumerate(((first, second), (second, first))):
        for row in list(left[at]):
            parts = _parts(side, other, row, left[1 - at])
            if parts:
                left[at].remove(row)
                left[1 - at] = [one for one in left[1 - at] if one not in parts]
                found.append(Joined(role, *((row,), parts) if at == 0 else (parts, (row,))))
    whole = [sum(side.size(row) for row in rows) for side, rows in zip((first, second), left)]
    if whole[0] == whole[1] and left[0] and left[1] and min(len(left[0]), len(left[1])) == 1:
        found.append(Joined(role, tuple(left[0]), tuple(left[1])))
    return sorted(found, key=lambda one: one.mine)


def _parts(side: Terms, other: Terms, row: int, rows: list[int]) -> tuple[int, ...]:
    """Rows of the other side that make a tensor when they are put together along the first dimension."""
    shape = side.side.shape[row]
    parts = tuple(one for one in rows if len(other.side.shape[one]) == len(shape) and other.side.shape[one][1:] == shape[1:])
    return parts if len(parts) > 1 and sum(other.size(one) for one in parts) == side.size(row) else ()


def _ordered(first: Terms, second: Terms, a: list[int], b: list[int]) -> list[tuple[int, int]]:
    plain = list(zip(a, b))
    alike = sum(_near(first, second, pair) for pair in plain)
    if not plain or alike == len(plain) == max(len(a), len(b)) or max(len(a), len(b)) > _MOST:
        return plain
    short, long = (a, b) if len(a) <= len(b) else (b, a)
    best = plain
    for order in permutations(long, len(short)):
        pairs = list(zip(short, order)) if short is a else list(zip(order, short))
        number = sum(_near(first, second, pair) for pair in pairs)
        if number > alike:
            best, alike = pairs, number
    return best


def _near(first: Terms, second: Terms, pair: tuple[int, int]) -> bool:
    return near(first.stats[pair[0]], second.stats[pair[1]])
