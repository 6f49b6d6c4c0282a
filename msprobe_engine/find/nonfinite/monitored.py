"""Numbers of a monitored run that are none, without those that are so in a healthy run: masks, and steps that a loss scaler skips."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from msprobe_engine.find.monitor.number_pairs import COMPARED, Number, order_in_step
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Key, Series


def not_finite(run: Run) -> Iterator[Number]:
    """Numbers that are infinite, or NaN after they were a number: a NaN from the first step on is how a file says that there is none."""
    for rank in run.ranks:
        masked, scaled = _find_masked_steps(run, rank), _skipped_by_scaler(run, rank)
        everything = [("loss" if "loss" in name else "step", "value", {Key(0, name): series}) for name, series in run.scalars(rank).items()]
        for family in run.families(rank):
            everything += [(family, op, run.series(rank, family, op)) for op in run.ops(rank, family) if op in (*COMPARED, "nans")]
        counts = {family: run.series(rank, family, "nans") for family in run.families(rank) if "nans" in run.ops(rank, family)}
        for family, op, table in everything:
            for number, (key, series) in enumerate(table.items()):
                known = np.logical_or.accumulate(np.isfinite(series.values)) | ("loss" in key.name and op == "value")
                bad = np.isinf(series.values) | (np.isnan(series.values) & known) | ((op == "nans") & (series.values > 0))
                if (counted := counts.get(family, {}).get(key)) is not None and op != "nans":  # without elements there is no statistic
                    bad &= ~(np.isnan(series.values) & np.isin(series.steps, counted.steps[counted.values == 0]))
                if family.startswith(("grad", "actv_grad")) or key.name.startswith("grad"):
                    bad &= ~np.isin(series.steps, scaled)
                if family == "actv" and (fine := masked.get(key)) is not None:
                    bad &= ~np.isin(series.steps, fine)
                wrong = np.flatnonzero(bad)
                if len(wrong):
                    step, value = int(series.steps[wrong[0]]), float(series.values[wrong[0]])
                    yield Number(step, order_in_step(family, key, number), rank, family, key, op, value, math.nan)


def _find_masked_steps(run: Run, rank: int) -> dict[Key, npt.NDArray[np.int64]]:
    """Activations and steps with -Inf, and nothing else that is not finite, in which the rule that looked at the run has not seen a fault:
    there is no alert, or the commands would not have come here. What it took for masks it says itself."""
    if not isinstance(run.info(rank).get("masks"), Mapping) or not {"min", "max"} <= set(run.ops(rank, "actv")):
        return {}
    low, high, nans = (run.series(rank, "actv", op) for op in ("min", "max", "nans"))
    masked = {}
    for key, series in low.items():
        fine = (series.values == -np.inf) & (high[key].values < np.inf)
        if key in nans:
            fine &= nans[key].values == 0
        if fine.any():
            masked[key] = series.steps[fine]
    return masked


def _skipped_by_scaler(run: Run, rank: int) -> list[int]:
    """Steps that a loss scaler skipped while it looked for its scale: before the first update, and one at a time after it."""
    numbers = run.scalars(rank)
    if not {"skipped", "loss_scale"} <= set(numbers):
        return []
    skipped, scale = numbers["skipped"], numbers["loss_scale"]
    skipped_steps: list[int] = []
    updated, row = False, 0
    for step, value in zip(skipped.steps.tolist(), skipped.values.tolist()):
        row = row + 1 if value > 0.0 else 0
        updated = updated or value <= 0.0
        if row and (not updated or row < 2) and _above_one(scale, step):
            skipped_steps.append(step)
    return skipped_steps


def _above_one(scale: Series, step: int) -> bool:
    positions = np.flatnonzero(scale.steps == step)
    return bool(len(positions)) and float(scale.values[positions[0]]) > 1.0
