"""Statistics of the monitor as plain values: what the in-memory calls of `TrainerMon` give; and what only its files have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from msprobe_engine.core.records import Sample
from msprobe_engine.core.statistics import columns
from msprobe_engine.core.statistics.rows import Rows
from msprobe_engine.probe.sinks.tensorboard import tag_of
from msprobe_integrations.common.parameters.gradients import CLIPPED, UNSCALED

Values = dict[str, dict[str, Any]]
"""Tag (as in TensorBoard, ``0:fc.weight/rank0/post_grad``) to statistic to value, see `Shown`."""


class Shown(NamedTuple):
    """How a framework's users expect values.

    Attributes:
        number: a statistic, as a tensor without dimensions.
        dtype: from the text in files.
    """

    number: Callable[[float], Any]
    shape: Callable[[tuple[int, ...]], Any]
    dtype: Callable[[str], Any]


def values_of(samples: Iterable[Sample], rows: Rows, ops: Sequence[str], rank: int, families: Sequence[str], shown: Shown) -> Values:
    """The statistics `ops` of the samples of some families. `rows`: [n, 16], what the samples refer to."""
    chosen = [s for s in samples if s.family in families and s.ref.row >= 0]
    if not chosen:
        return {}
    chosen_rows = rows[[s.ref.row for s in chosen]]
    numbers = {op: columns.column(chosen_rows, op).tolist() for op in ops if op in columns.OPS}
    digests = columns.digests(chosen_rows) if "digest" in ops else []
    out: Values = {}
    for i, sample in enumerate(chosen):
        entry: dict[str, Any] = {}
        for op in ops:
            if op == "shape":
                entry[op] = shown.shape(sample.ref.description.shape)
            elif op == "dtype":
                entry[op] = shown.dtype(sample.ref.description.dtype)
            elif op == "digest":
                entry[op] = digests[i]
            else:
                entry[op] = shown.number(numbers[op][i])
        out[tag_of(sample, rank)] = entry
    return out


def note_entry(samples: list[Sample]) -> None:
    """Reduced gradients that were unscaled or clipped before the optimizer's step keep their known tag; their phase says what they are."""
    for i, sample in enumerate(samples):
        if sample.family == "grad_reduced" and sample.phase in (UNSCALED, CLIPPED):
            samples[i] = sample._replace(extra={**sample.extra, "entry": True})
