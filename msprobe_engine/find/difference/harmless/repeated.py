"""Numbers that one side repeats before a call, and that the call of the other side repeats by itself (keys of grouped heads)."""

from __future__ import annotations

from typing import Any

import numpy as np

from msprobe_engine.align.calls.call_tree import calls_function
from msprobe_engine.find.difference.harmless.left_out import HIDDEN
from msprobe_engine.find.difference.paired_rank import PairedRank
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, DumpTable
from msprobe_engine.measure import roundoff


def leave_out_repeated(walker: PairedRank) -> None:
    """What such a call takes in has another shape on either side, and what it gives is compared. The gradient that comes back is that of
    each copy, or of all of them, which the call that has made the copies takes together: what comes back from there is compared."""
    m = walker.measured
    for pair in np.flatnonzero(m.shape).tolist():
        row, golden_row = walker.rows[pair]
        op, results = walker.side.op[row], walker.result_pairs(walker.side.op[row])
        if walker.side.role[row] != INPUT or not calls_function(walker.target.kinds[op]) or _is_mask(walker.golden.side, golden_row):
            continue
        if not results or m.shape[results].any() or not m.compared[results].all():
            continue
        by_one_side = walker.target.producers.get(row) in walker.extra or walker.golden.producers.get(golden_row) in walker.missing
        shapes = walker.side.shape[row], walker.golden.side.shape[golden_row]
        if not by_one_side or not _is_repetition(*shapes):
            continue
        of_gradient = (
            back
            for back in walker.span_of_twin(op)
            if walker.side.role[walker.rows[back][0]] == OUTPUT
            and (walker.side.shape[walker.rows[back][0]], walker.golden.side.shape[walker.rows[back][1]]) == shapes
        )
        without = [pair, *of_gradient]
        m.leave_out(without)
        m.shape[without] = False
        walker.repeating.add(op)


def _is_mask(side: DumpTable, row: int) -> bool:
    """It says, by truth values or by numbers that hide, which scores count."""
    return roundoff.eps(side.dtype[row]) == 0 or not side.stats[row][1] > HIDDEN


def _is_repetition(target: Any, golden: Any) -> bool:
    """The shapes differ in one dimension, which is in one of them a multiple of what it is in the other."""
    if not isinstance(target, list) or not isinstance(golden, list) or len(target) != len(golden):
        return False
    unequal = [sizes for sizes in zip(target, golden) if sizes[0] != sizes[1]]
    return len(unequal) == 1 and min(unequal[0]) > 0 and max(unequal[0]) % min(unequal[0]) == 0
