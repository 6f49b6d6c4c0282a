"""Derived numbers of modules (attention entropy, spectral norms, routing) as one line per module with one column per number."""

from __future__ import annotations

from collections.abc import Sequence

from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.statistics.columns import Column, column

FEATURES: dict[str, tuple[str, ...]] = {
    "attention_hook": ("entropy", "softmax_max"),
    "linear_hook": ("sr", "kernel_norm"),
    "moe_router_weight_hook": ("router_weight_similarity",),
    "moe_router_logit_hook": ("per_token_expert_entropy",),
}
"""Families of single numbers and the columns that the existing tool has for them; further ones come behind."""


def pivot(frame: Frame, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, Column]]:
    """One sample per module (name, chunk, micro batch), and the numbers by column, each float64 [n] with NaN where there is none.

    Args:
        samples: samples of one feature family; ``extra["column"]`` says which number each is.
    """
    import numpy as np

    lines: dict[tuple[int, str, int], int] = {}
    first: list[Sample] = []
    where: list[tuple[str, int]] = []
    for sample in samples:
        key = sample.vpp_stage, sample.name, sample.micro_step
        if key not in lines:
            lines[key] = len(first)
            first.append(sample)
        where.append((str(sample.extra.get("column", "value")), lines[key]))
    out: dict[str, Column] = {}
    rows = [s.ref.row for s in samples]
    known = [i for i, row in enumerate(rows) if row >= 0]
    # A row of one element: its mean is the number.
    values = column(frame.rows[[rows[i] for i in known]], "mean").tolist() if known else []
    for i, value in zip(known, values):
        name, line = where[i]
        if name not in out:
            out[name] = np.full(len(first), np.nan)
        out[name][line] = value
    return first, out
