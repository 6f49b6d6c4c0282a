"""Differences that are no place where one begins, because what comes out of the call is the same on both sides.

What goes into a module whose calls were recorded is taken in by those calls, and a call like ``zeros_like`` takes only the form of what it
is given: when a search for the origin stopped there, it would name the wrong place wherever another one exists. Where none does, a number
differs all the same, and that is the finding (`divergence.settle_origins`).

Only another form is no difference by itself: no tensor in place of one, bool in place of numbers, or truth values that one side repeats
along a dimension (another kind of mask), when what is made of it is the same.
"""

from __future__ import annotations

from itertools import zip_longest

from msprobe_engine.core.dtypes import is_bool, other_form
from msprobe_engine.find.difference.paired_rank import PairedRank
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT


def for_nothing(walker: PairedRank, op: int, pair: int, known: bool, off: bool) -> bool:
    """The result of a call is the same whatever goes in at one place.

    Args:
        op: the record.
        pair: the pair of rows that goes in.
        known: something that comes out could be compared.
        off: what comes out differs.
    """
    if off or not known or walker.target.kinds[op][0] != "forward":
        return False
    if has_another_form(walker, pair) or walker.side.ops[op].split(".")[1].endswith("_like"):
        return True
    module = len(walker.target.kinds[op]) == 4 and walker.side.role[walker.rows[pair][0]] == INPUT
    return module and bool(walker.target.children.get(op))


def worst(walker: PairedRank, op: int) -> int:
    """The pair of rows that goes into a record and is most off, in the same form; -1 without one."""
    m, role, ratio = walker.measured, walker.side.role, walker.carried.ratio
    off = [
        pair
        for pair in walker.span_of(op)
        if ratio[pair] > 1 and not m.argument[pair] and role[walker.rows[pair][0]] != OUTPUT and not has_another_form(walker, pair)
    ]
    return max(off, key=ratio.__getitem__, default=-1)


def has_another_form(walker: PairedRank, pair: int) -> bool:
    """No tensor in place of one, bool in place of numbers, or truth values that are repeated along a dimension on one side."""
    (row, golden_row), target, golden = walker.rows[pair], walker.side, walker.golden.side
    shape, golden_shape = target.shape[row], golden.shape[golden_row]
    if isinstance(shape, list) != isinstance(golden_shape, list):
        return True
    if (
        shape != golden_shape
        and is_bool(target.dtype[row])
        and is_bool(golden.dtype[golden_row])
        and isinstance(shape, list)
        and isinstance(golden_shape, list)
    ):
        return all(
            target_size == golden_size or 1 in (target_size, golden_size)
            for target_size, golden_size in zip_longest(reversed(shape), reversed(golden_shape), fillvalue=1)
        )
    return other_form(target.dtype[row], golden.dtype[golden_row])
