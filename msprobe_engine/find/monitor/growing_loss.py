"""What the losses say of a NaN: one that grows from step to step until it is no number (updates that are too large, which no operator is
to blame for), and one of some ranks alone (their data, or their device)."""

from __future__ import annotations

import numpy as np

from msprobe_engine.core.text.ranges import ranks_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.findings import NONFINITE, Diagnosis, Suspect
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Series

_GROWN = 1e3
"""A training that diverges multiplies its loss by more than this before it overflows; one that meets a single NaN does not."""


def name_loss(diagnosis: Diagnosis, run: Run) -> None:
    """Say so in the first line of a NaN or Inf; of a loss that grows with the learning rate where it is known."""
    first = diagnosis.first_suspect
    if diagnosis.finding != NONFINITE or first is None:
        return
    numbers = run.scalars(first.rank)
    loss = _before(numbers.get("loss"), first.step)
    if loss is None or not 0 < _GROWN * abs(loss[1]) <= abs(loss[3]):
        _name_ranks(first, run)
        return
    begun, small, grown, large = loss
    said = f"{small:.4g}", begun, f"{large:.4g}", grown
    rate = _before(numbers.get("learning_rate"), first.step)
    if rate is None:
        first.cause = Sentence("the loss grew from {0} in step {1} to {2} in step {3}: the updates are too large", *said)
    else:
        template = "the loss grew from {0} in step {1} to {2} in step {3}: the updates are too large (learning rate {4})"
        first.cause = Sentence(template, *said, f"{rate[3]:.4g}")
    first.why = Sentence("{0}; {1}", first.cause, first.why)


def _name_ranks(first: Suspect, run: Run) -> None:
    """Of a loss that is none on some ranks and finite on others in the same step."""
    if first.record != "loss" and first.kind != "loss_not_finite":
        return
    losses = {rank: series for rank in run.ranks if (series := run.scalars(rank).get("loss")) is not None}
    values = {rank: series.values[series.steps == first.step] for rank, series in losses.items()}
    finite = [rank for rank, value in values.items() if len(value) and np.isfinite(value).all()]
    bad = [rank for rank, value in values.items() if len(value) and not np.isfinite(value).all()]
    if finite and bad:
        said = Sentence("the loss of {0} is NaN or Inf, that of {1} is finite", ranks_text(bad), ranks_text(finite))
        first.cause = said
        first.why = Sentence("{0}: look at the batch of this step there; {1}", said, first.why)


def _before(series: Series | None, step: int) -> tuple[int, float, int, float] | None:
    """The first and the last finite number up to a step, each with its step."""
    if series is None:
        return None
    known = np.flatnonzero(np.isfinite(series.values) & (series.steps <= step))
    if not len(known):
        return None
    begin, end = known[[0, -1]].tolist()
    return int(series.steps[begin]), float(series.values[begin]), int(series.steps[end]), float(series.values[end])
