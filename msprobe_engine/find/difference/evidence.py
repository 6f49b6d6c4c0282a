"""Sentences with numbers about a step: how much differs, by how much what agrees does, and where."""

from __future__ import annotations

import numpy as np

from msprobe_engine.core.text.sentences import Sentence, joined
from msprobe_engine.find.difference.divergence import Divergence
from msprobe_engine.measure.distances import of_other_precision

MOST_RANKS = 16
"""So many are named."""


def precision(divergence: Divergence) -> list[str]:
    """That the runs are of different precision as a whole, which is no difference by itself; of the rank where most tensors are."""
    most, line = 0, list[str]()
    for walker in divergence.walkers.values():
        m = walker.measured
        differ = m.dtype & ~m.argument
        tensors, other = int((~m.argument).sum()), int(differ.sum())
        if other > most and of_other_precision(m.dtype, m.argument):
            row, partner = walker.rows[int(np.argmax(differ))]
            template = "The runs are of different precision: {0} of {1} tensors have another type, the first {2} against {3}."
            most, line = (
                other,
                [Sentence(template, f"{other:,}", f"{tensors:,}", walker.side.dtype[row], walker.golden.side.dtype[partner])],
            )
    return line


def amount(divergence: Divergence, distance: float) -> str:
    if any(walker.calibrated for walker in divergence.walkers.values()):
        return Sentence("{0} times the round-off that the calibration shows for the record", f"{distance:.1f}")
    return Sentence("{0} of a tensor's size", f"{distance:.1e}")


def of_step(divergence: Divergence) -> list[str]:
    compared = sum(walk.compared for walk in divergence.walks.values())
    differing = sum(walk.differing for walk in divergence.walks.values())
    template = "{0} of {1} records differ by more than round-off; all behind the first suspect may follow from it."
    lines: list[str] = [Sentence(template, f"{differing:,}", f"{compared:,}")]
    largest = max((walk.largest for walk in divergence.walks.values()), default=0.0)
    lines.append(Sentence("Records that agree differ by at most {0}.", amount(divergence, largest)))
    if len(divergence.walks) > 1:
        counts = [(rank, len(walk.origins)) for rank, walk in sorted(divergence.walks.items()) if walk.origins]
        by_rank = joined(", ", (Sentence("rank {0}: {1}", rank, n) for rank, n in counts[:MOST_RANKS]))
        if len(counts) > MOST_RANKS:
            by_rank = Sentence("{0} and {1} more ranks", by_rank, f"{len(counts) - MOST_RANKS:,}")
        lines.append(Sentence("Places where a difference begins, by rank: {0}", by_rank))
    return lines
