"""Whether two monitored runs were given the same batches, by the digest that each writes of the integers its models are called with."""

from __future__ import annotations

import numpy as np

from msprobe_engine.core.records import BATCH_DIGEST
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.monitor.shapes_and_dtypes import are_of_one_layout
from msprobe_engine.formats.monitor.reader import Run


def find_other_batches(target: Run, golden: Run, until: int) -> tuple[Suspect | None, Sentence | None]:
    """The batch of step `until`, where that of a rank is not that of the golden run, as a suspect; and what is to be said beside other
    suspects, where all batches up to then are the same. Neither where digests are missing, where they differ in a step before, in which
    the runs agree (they were made of other inputs), or where the runs deal the samples out to their ranks in other ways.

    Args:
        until: the step in which the runs part.
    """
    if not are_of_one_layout(target, golden):
        return None, None
    others: list[tuple[int, int]] = []  # step, rank
    counts: list[int] = []
    for rank in sorted(set(target.ranks) & set(golden.ranks)):
        known, expected = (run.scalars(rank).get(BATCH_DIGEST) for run in (target, golden))
        if known is None and expected is None:  # a later stage of a pipeline is given no integers
            continue
        if known is None or expected is None:
            return None, None
        steps, i, j = np.intersect1d(known.steps, expected.steps, assume_unique=True, return_indices=True)
        digests = known.values[i], expected.values[j]
        readable = np.isfinite(digests[0]) & np.isfinite(digests[1]) & (steps <= until)
        if until not in steps[readable]:
            return None, None
        counts.append(int(readable.sum()))
        others += [(step, rank) for step in steps[readable & (digests[0] != digests[1])].tolist()]
    if not others:
        template = (
            "The models were given the same samples until then, in whatever order (integer inputs: tokens, labels; steps compared: {0})."
        )
        return None, Sentence(template, f"{min(counts):,}") if counts else None
    step, rank = min(others)
    if step < until:
        return None, None
    before = min(counts) - 1
    other = Sentence("the integer inputs of the models (tokens, labels) differ from those of the golden run")
    why = (
        Sentence("{0}; those of the steps before are the same ({1})", other, f"{before:,}")
        if before
        else Sentence("{0}, from the first step on", other)
    )
    row = f"step/{BATCH_DIGEST}"
    return Suspect(row, "", rank, step, kind="data", why=why, cause=Sentence("the batch is not that of the golden run"), tensor=row), None
