"""For tests of rules and sinks: statistics rows and frames made from plain lists of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from msprobe_engine.core.records import Entry, Frame, Sample, TensorDescription, TensorRef
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows

TENSOR = TensorDescription("torch.Tensor", "torch.float32", (4,), True)


def row_of(values: Iterable[float], digest: int | None = None) -> Rows:
    """The statistics row of a list of numbers, [1, 16]: the definition in `msprobe_engine.core.statistics.rows`, element by element."""
    x = np.array(list(values), np.float64)
    row = _rows.empty(1)
    ints = _rows.as_int64(row)
    finite = x[np.isfinite(x)]
    ints[0, _rows.COUNT] = len(x)
    ints[0, _rows.NANS] = int(np.isnan(x).sum())
    ints[0, _rows.POS_INF] = int((x == np.inf).sum())
    ints[0, _rows.NEG_INF] = int((x == -np.inf).sum())
    ints[0, _rows.ZEROS] = int((x == 0).sum())
    ints[0, _rows.FLAGS] = _rows.WRITTEN
    if digest is not None:
        ints[0, _rows.DIGEST] = digest
        ints[0, _rows.FLAGS] |= _rows.HAS_DIGEST
    if len(finite):
        row[0, _rows.MIN], row[0, _rows.MAX] = finite.min(), finite.max()
        row[0, _rows.SUM], row[0, _rows.SUMSQ] = finite.sum(), (finite * finite).sum()
    return row


def frame_of(
    tensors: Mapping[str, Sequence[float]] | None = None,
    *,
    step: int = 0,
    rank: int = 0,
    family: str = "grad_reduced",
    phase: str = "reduced",
    micro_step: int = -1,
    entries: Mapping[str, Sequence[float]] | None = None,
    scalars: Mapping[str, float] | None = None,
    complete: bool = True,
    lost: Mapping[str, int] | None = None,
) -> Frame:
    """A frame with one sample per name of `tensors` and one entry with one output per name of `entries`."""
    tensors, entries = tensors or {}, entries or {}
    rows = [row_of(v) for v in (*entries.values(), *tensors.values())]
    first = len(entries)
    return Frame(
        step,
        rank,
        np.concatenate(rows) if rows else _rows.empty(0),
        entries=[Entry(name, {"output": [TensorRef(i, TENSOR)]}) for i, name in enumerate(entries)],
        samples=[Sample(family, name, TensorRef(first + i, TENSOR), phase, micro_step) for i, name in enumerate(tensors)],
        scalars=dict(scalars or {}),
        complete=complete,
        lost=dict(lost or {}),
    )
