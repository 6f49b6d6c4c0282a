"""Arguments that one side gives a function and the other one leaves to their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.formats.dump.dump_table import INPUT
from msprobe_engine.measure import missing_statistics


class LoneArgument(NamedTuple):
    """An argument.

    Attributes:
        place: its name among the inputs.
        value: what it is.
        here: the target gives it, not the golden side.
    """

    place: str
    value: Any
    here: bool


def lone_arguments(
    target: Tree, golden: Tree, pairs: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int]]
) -> dict[int, LoneArgument]:
    """Record of the target -> the first such argument of its call. One that both sides give, by name or by place, is none."""
    sides = target.side, golden.side
    back = {b: a for a, b in pairs}
    alone = missing_statistics.alone(*sides, pairs, rows)
    found: dict[int, list[LoneArgument]] = {}
    for here, side, some_rows in zip((True, False), sides, alone):
        for row in some_rows:
            op = side.op[row] if here else back[side.op[row]]
            value = side.values.get(row)
            if side.role[row] == INPUT and value is not None and len(target.kinds[op]) == 3:
                place = side.name[row].rpartition(".input.")[2]
                found.setdefault(op, []).append(LoneArgument(place, value, here))
    left: dict[int, LoneArgument] = {}
    for op, some in found.items():
        others = {here: [repr(one.value) for one in some if one.here is not here] for here in (True, False)}
        one = next((one for one in some if repr(one.value) not in others[one.here]), None)
        if one is not None:
            left[op] = one
    return left
