"""What matched calls return on one side only: an output more or less is no other number, and still not the same program."""

from __future__ import annotations

import numpy as np

from msprobe_engine.align.calls.alignment import crossed
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.formats.dump.dump_table import OUTPUT
from msprobe_engine.measure import dump_dialects
from msprobe_engine.measure.factorize import firsts


def on_one_side(walker: DifferenceWalk) -> tuple[list[str], list[str]]:
    """Names of outputs of forward calls that only the target has, and of those that only the golden side has.

    A place without a value (null) is there: the call returns None, or its recorder leaves the value out. Dumps of two tools are not asked,
    because each has its own rules of what it writes, nor those of two frameworks, whose functions give other things beside the result.
    """
    found: tuple[list[str], list[str]] = [], []
    sides = walker.side, walker.golden.side
    if dump_dialects.differ(*sides) or crossed(*sides) or not walker.structure.pairs:
        return found
    pairs = np.array(walker.structure.pairs, np.int64).reshape(-1, 2)
    counts = [np.diff(firsts(side))[pairs[:, k]] for k, side in enumerate(sides)]
    together = np.diff(np.array(walker.starts, np.int64))
    for at in np.flatnonzero((counts[0] > together) | (counts[1] > together)).tolist():
        paired = [set(rows) for rows in zip(*walker.rows[walker.starts[at] : walker.starts[at + 1]])] or [set(), set()]
        for k, side in enumerate(sides):
            op = int(pairs[at, k])
            if not counts[1 - k][at] and sides[1 - k].problems:
                continue  # the other record was damaged and left out, which is said
            if not (side.ops[op].endswith(".forward") or ".forward." in side.ops[op]):
                continue
            more = (row for row in side.rows(op) if side.role[row] == OUTPUT and side.dtype[row] is not None and row not in paired[k])
            found[k].extend(side.name[row] for row in more)
    return found
