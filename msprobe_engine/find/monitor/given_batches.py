"""Whether two monitored runs were given the same batches, by the digest that each writes of the integers its models are called with."""

from __future__ import annotations

import numpy as np

from msprobe_engine.core.records import BATCH_DIGEST
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.monitor.shapes_and_dtypes import are_of_one_layout
from msprobe_engine.formats.monitor.reader import Run


def find_other_batches(target: Run, golden: Run, until: int) -> tuple[Suspect | None, Sentence | None]:
    """The first step, up to `until`, in which the batch of a rank is not that of the golden run, as a suspect; and what is to be said
    beside other suspects, where all batches up to then are the same. Neither where digests are missing, or where the runs deal the
    samples out to their ranks in other ways.

    Args:
        until: the step in which the runs part, or the last one.
    """
    if not are_of_one_layout(target, golden):
        return None, None
    first: tuple[int, int, int] | None = None  # step, rank, equal steps before
    equal = 0
    for rank in sorted(set(target.ranks) & set(golden.ranks)):
        known, expected = (run.scalars(rank).get(BATCH_DIGEST) for run in (target, golden))
        if known is None or expected is None:
            return None, None
        steps, i, j = np.intersect1d(known.steps, expected.steps, assume_unique=True, return_indices=True)
        other = known.values[i] != expected.values[j]
        seen = int((steps <= until).sum())
        place = int(other[:seen].argmax()) if other[:seen].any() else -1
        if place >= 0 and (first is None or steps[place] < first[0]):
            first = int(steps[place]), rank, place
        equal = max(equal, seen)
    if first is None:
        template = "The models were given the same batches until then (integer inputs: tokens, labels; steps compared: {0})."
        return None, Sentence(template, f"{equal:,}") if equal else None
    step, rank, before = first
    others = Sentence("the integer inputs of the models (tokens, labels) differ from those of the golden run")
    why = (
        Sentence("{0}; those of the steps before are the same ({1})", others, f"{before:,}")
        if before
        else Sentence("{0}, from the first step on", others)
    )
    row = f"step/{BATCH_DIGEST}"
    return Suspect(row, "", rank, step, kind="data", why=why, cause=Sentence("the batch is not that of the golden run"), tensor=row), None
