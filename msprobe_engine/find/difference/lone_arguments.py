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
    candidates: dict[int, list[LoneArgument]] = {}
    for in_target, side, some_rows in zip((True, False), sides, alone):
        for row in some_rows:
            op = side.op[row] if in_target else back[side.op[row]]
            value = side.values.get(row)
            if side.role[row] == INPUT and value is not None and len(target.kinds[op]) == 3:
                place = side.name[row].rpartition(".input.")[2]
                candidates.setdefault(op, []).append(LoneArgument(place, value, in_target))
    kept: dict[int, LoneArgument] = {}
    for op, some in candidates.items():
        others = {in_target: [repr(argument.value) for argument in some if argument.here is not in_target] for in_target in (True, False)}
        argument = next((argument for argument in some if repr(argument.value) not in others[argument.here]), None)
        if argument is not None:
            kept[op] = argument
    return kept
