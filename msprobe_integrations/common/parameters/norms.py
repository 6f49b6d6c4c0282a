"""Norms of all parameters, updates and gradients together, as numbers of the step: worked out from the rows there are."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from msprobe_engine.core.records import TensorRef
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.probe.pending_steps import ChangedRows
from msprobe_integrations.common.parameters.gradients import REDUCED, UNSCALED, set_values

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.probe import Probe


def note_norms(probe: Probe, given: Mapping[str, Any]) -> None:
    """Note ``update_norm``, ``param_norm`` and ``grad_norm`` of the step that ends, over the parameters of this rank: whole ones where
    the rows of shards are merged, and none where they should have been and could not be. Numbers that are there already stay, and those
    that are `given` come. To be called behind all other edits of the step.

    ``param_norm`` is of parameters after the update, ``grad_norm`` of gradients before clipping and without the loss scale.
    """
    pipeline = probe.pipeline
    found: dict[str, list[int]] = {}
    for sample in pipeline.samples:
        if sample.family in _FAMILIES:
            found.setdefault(sample.family + sample.phase, []).append(sample.ref.row)
    if given.get("loss_scale") is not None:
        pipeline.scalar("loss_scale", given["loss_scale"])
    gradients = found.get("grad_reduced" + UNSCALED)
    scale = None if gradients else pipeline.noted("loss_scale")
    for name, places in (
        ("update_norm", found.get("update")),
        ("param_norm", found.get("param_updated") or found.get("param_origin")),
        ("grad_norm", gradients or found.get("grad_reduced" + REDUCED)),
    ):
        if places and name not in given and pipeline.noted(name) is None:
            row = probe.backend.blank_row()
            divisor = scale if name == "grad_norm" else None
            pipeline.edit_rows(ChangedRows(functools.partial(_norm, row, [p for p in places if p >= 0], divisor)))
            pipeline.scalar(name, TensorRef(row, probe.number))


_FAMILIES = frozenset(("update", "param_updated", "param_origin", "grad_reduced"))


def _norm(row: int, places: Sequence[int], divisor: TensorRef | float | None, rows: _rows.Rows) -> None:
    chosen = rows[places]
    norm = math.sqrt(float(np.sum(chosen[:, _rows.SUMSQ])))
    ints = _rows.as_int64(chosen)
    if ints[:, _rows.NANS].any():
        norm = math.nan
    elif ints[:, _rows.POS_INF].any() or ints[:, _rows.NEG_INF].any():
        norm = math.inf
    elif (ints[:, _rows.FLAGS] & _rows.WRITTEN == 0).any():
        return  # a part is not known, so there is no norm of the whole
    if isinstance(divisor, TensorRef):
        divisor = _rows.read(rows[divisor.row]).mean if divisor.row >= 0 else None
    set_values(rows, np.array([row]), np.array([norm / divisor if divisor else norm]))
