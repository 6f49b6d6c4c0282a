"""Parameters that alone come out of an update with other numbers, where no call of it was recorded.

Where a step was the same to the last bit, its gradients were, and two kernels of one optimizer leave most elements the same or hardly an
element. What moves most parameters to the same bits and one of them elsewhere is no other kernel.
"""

from __future__ import annotations

import numpy as np

from msprobe_engine.find.difference.paired_rank import PairedRank
from msprobe_engine.formats.dump.dump_table import PARAMETERS
from msprobe_engine.measure import distances

_MUCH = 0.25
"""Part of its way that a parameter is off by: an element that was rounded otherwise, of 16 of them or more, makes less of the mean."""


def find_lone_updates(walker: PairedRank, before: PairedRank) -> set[int]:
    """Pairs of rows of such parameters; nothing where the step before differs in anything."""
    if (before.measured.distance > 0).any():
        return set()
    side, golden, earlier = walker.side, walker.golden.side, before.golden.side
    places = {name: row for row, name in enumerate(earlier.name)}
    same, off = 0, set()
    for pair in np.flatnonzero(walker.measured.known).tolist():
        row, golden_row = walker.rows[pair]
        was = places.get(golden.name[golden_row], -1) if side.role[row] == PARAMETERS else -1
        if was < 0 or earlier.shape[was] != golden.shape[golden_row]:
            continue
        units = np.array((np.sqrt(distances.elements(golden.shape[golden_row])), 1.0))  # of mean and norm
        moved = float((np.abs(golden.stats[golden_row] - earlier.stats[was])[2:] * units).max())
        apart = float((np.abs(side.stats[row] - golden.stats[golden_row])[2:] * units).max())
        same += moved > 0 and not walker.measured.distance[pair]
        if apart > _MUCH * moved:
            off.add(pair)
    return off if same > len(off) else set()
