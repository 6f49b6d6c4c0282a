"""Two runs that were the same, bit by bit, until a call: what round-off of that call alone can amount to in a type of 16 bits.

One unit of such a type is a large part of a number, and defects are smaller (another eps, another learning rate). Where nothing has
differed yet, more can be said: rounding moves the elements up as often as down, so that the norm of many of them hardly moves, and another
result of another argument is no round-off at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msprobe_engine.formats.dump.dump_table import OUTPUT
from msprobe_engine.measure import distances, roundoff
from msprobe_engine.measure.segments import RecordSums

if TYPE_CHECKING:
    from msprobe_engine.find.difference.walk import DifferenceWalk


def bit_equal_limit(walker: DifferenceWalk, at: int, records: RecordSums, known: float) -> float:
    """The limit of the first pair of records in which something differs.

    Args:
        at: position of the pair.
        known: its limit where differences came before, as `DifferenceWalk.limits` has it; given back for other types, modules whose calls
            are there too, the backward pass, and behind calls that only one side has.
    """
    op, other = walker.structure.pairs[at]
    leaf = not walker.target.children.get(op) and not walker.golden.children.get(other) and walker.target.kinds[op][0] == "forward"
    strangers = min(walker.extra, default=op) < op or min(walker.missing, default=other) < other
    if not roundoff.is_short(known) or not leaf or strangers:
        return known
    same = not records.inner[at]
    if same and records.argument[at] >= 0 and records.outer[at] > 0:
        return float(records.outer[at]) / 2
    found = known
    for pair in walker.span_of(op):
        row = walker.rows[pair][0]
        if same if walker.side.role[row] == OUTPUT else walker.target.producers.get(row) is None:
            averaged = roundoff.averaged_limit(known, distances.elements(walker.side.shape[row]))
            if walker.measured.norm[pair] > averaged:
                found = min(found, averaged)
    return found
