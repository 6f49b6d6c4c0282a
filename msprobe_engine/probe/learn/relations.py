"""Relations that held in every step of healthy runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Series, Table

FEW = 10
"""Steps in which a relation has to have held."""
_COMPARED = ("norm", "min", "max", "mean", "zeros")


def relations(runs: Sequence[Run]) -> tuple[tuple[str, ...], bool, bool]:
    """What held in all runs and on all ranks.

    Returns:
        Parameters (``{vpp_stage} {name}``) that changed with every optimizer step; whether all reduced gradients were finite in every
        step; whether the loss scale fell only where an update was skipped. False where it could not be seen.
    """
    changing: set[str] = set()
    still: set[str] = set()
    finite: list[bool] = []
    scale: list[bool] = []
    for run in runs:
        for rank in run.ranks:
            scalars = run.scalars(rank)
            moved, stayed = _changes(run.table(rank, "param_origin"), run.table(rank, "param_updated"), _idle(scalars))
            changing |= moved
            still |= stayed
            gradients = run.table(rank, "grad_reduced")
            if len(gradients.ids) >= FEW:
                finite.append(_finite(gradients))
            if "loss_scale" in scalars and len(scalars["loss_scale"].steps) >= FEW:
                scale.append(_falls_on_overflow(scalars["loss_scale"], scalars.get("skipped")))
    return tuple(sorted(changing - still)), bool(finite) and all(finite), bool(scale) and all(scale)


def _idle(scalars: dict[str, Series]) -> set[int]:
    """Steps that change no parameter: learning rate 0, or skipped."""
    idle: set[int] = set()
    if (rate := scalars.get("learning_rate")) is not None:
        idle.update(rate.steps[rate.values == 0.0].tolist())
    if (skipped := scalars.get("skipped")) is not None:
        idle.update(skipped.steps[skipped.values > 0.0].tolist())
    return idle


def _changes(before: Table, after: Table, idle: set[int]) -> tuple[set[str], set[str]]:
    """Parameters that changed in all of at least `FEW` steps, and those that did not in one."""
    ops = [op for op in _COMPARED if op in after.values and op in before.values]
    moved: set[str] = set()
    stayed: set[str] = set()
    if len(ops) < 2:
        return moved, stayed
    old = {op: before.series(op) for op in ops}
    new = {op: after.series(op) for op in ops}
    for key, series in new[ops[0]].items():
        first = old[ops[0]].get(key)
        if first is None:
            continue
        common, i, j = np.intersect1d(first.steps, series.steps, return_indices=True)
        changed = np.zeros(len(common), np.bool_)
        for op in ops:
            changed |= old[op][key].values[i] != new[op][key].values[j]
        changed = changed[[step not in idle for step in common.tolist()]]
        name = f"{key.vpp_stage} {key.name}"
        if len(changed) >= FEW and changed.all():
            moved.add(name)
        elif not changed.all():
            stayed.add(name)
    return moved, stayed


def _finite(table: Table) -> bool:
    for op in ("nans", "infs"):
        if op in table.values and (table.values[op] > 0).any():
            return False
    norm = table.values.get("norm")
    return norm is not None and bool(np.isfinite(norm).all())


def _falls_on_overflow(scale: Series, skipped: Series | None) -> bool:
    falls = set(scale.steps[1:][np.diff(scale.values) < 0.0].tolist())
    if not falls:
        return len(set(scale.values.tolist())) > 1 or skipped is not None
    if skipped is None:
        return False
    left_out = set(skipped.steps[skipped.values > 0.0].tolist())
    return all(step in left_out or step - 1 in left_out for step in falls)
