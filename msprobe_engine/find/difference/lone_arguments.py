"""Arguments that one side gives a function and the other one leaves to their defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from msprobe_engine.formats.dump.dump_table import INPUT
from msprobe_engine.measure import missing_statistics

if TYPE_CHECKING:
    from msprobe_engine.find.difference.walk import DifferenceWalk


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


def lone_arguments(walker: DifferenceWalk) -> dict[int, LoneArgument]:
    """Record of the target -> the first such argument of its call. One that both sides give, by name or by place, is none."""
    sides = walker.side, walker.golden.side
    alone = missing_statistics.alone(*sides, walker.structure.pairs, walker.rows)
    found: dict[int, list[LoneArgument]] = {}
    for here, side, rows in zip((True, False), sides, alone):
        for row in rows:
            op = side.op[row] if here else walker.back[side.op[row]]
            value = side.values.get(row)
            if side.role[row] == INPUT and value is not None and len(walker.target.kinds[op]) == 3:
                place = side.name[row].rpartition(".input.")[2]
                found.setdefault(op, []).append(LoneArgument(place, value, here))
    left: dict[int, LoneArgument] = {}
    for op, some in found.items():
        others = {here: [repr(one.value) for one in some if one.here is not here] for here in (True, False)}
        one = next((one for one in some if repr(one.value) not in others[one.here]), None)
        if one is not None:
            left[op] = one
    return left
