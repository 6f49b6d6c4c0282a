"""Rule ``no_progress``: steps go by and nothing changes.

That no step goes by at all cannot be seen from inside a frame; the Prometheus alert ``MsprobeNoStep`` looks after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import FINER_COPY, Frame
from msprobe_engine.core.statistics.rows import COUNT, DIGEST, FLAGS, HAS_DIGEST, MAX, MIN, SUM, SUMSQ, ZEROS, as_int64
from msprobe_engine.probe.rules.alert_factory import scalar_alert
from msprobe_engine.probe.rules.arguments import CommonArgs, arg
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.kinds import scalar_kind
from msprobe_engine.probe.rules.layout import Layout


@dataclass(frozen=True, kw_only=True)
class NoProgressArgs(CommonArgs):
    """Arguments of the rule."""

    patience: int = arg(10, "monitored steps in a row without a change before the rule fires, and between two alerts", minimum=1)


class NoProgressRule(Rule):
    """Warnings when for `patience` frames in a row the loss is bitwise the same, all reduced gradients are exactly zero, or all
    updated parameters are the same (by digest where it was taken, else by five statistics).

    Steps with learning rate 0 say nothing about parameters, nor do those of which the optimizer updates a finer copy. What a frame does
    not hold is not judged.
    """

    name = "no_progress"
    fires = "`patience` monitored steps with the same loss, with all reduced gradients exactly zero, or with unchanged parameters"
    meaning = "Nothing is learned: a learning rate of 0, a graph that is cut off, frozen parameters, or the same batch over and over."
    next = "check learning rate, requires_grad and the data loader"
    all_kinds = ("loss", "grad", "param")
    args_type = NoProgressArgs
    args: NoProgressArgs

    def setup(self) -> None:
        self._same: dict[str, int] = {}
        self._losses: dict[str, float] = {}
        self._params: npt.NDArray[np.int64] | None = None
        self._layout: Layout | None = None
        self._families: dict[str, npt.NDArray[np.intp]] = {}

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame; a step that was cut off is not looked at."""
        if not frame.complete:
            return []
        alerts: list[Alert] = []
        if "loss" in self.kinds:
            for name, value in frame.scalars.items():
                if scalar_kind(name) == "loss":
                    alerts += self._count(frame, name, "loss", self._loss_stays(name, value), value, "unchanged", "a loss that changes")
        if "grad" in self.kinds:
            rows = self._rows_of(frame, "grad_reduced")
            zero = bool((as_int64(rows)[:, ZEROS] == as_int64(rows)[:, COUNT]).all()) if len(rows) else None
            alerts += self._count(frame, "all reduced gradients", "grad", zero, 0.0, "exactly zero", "gradients other than zero")
        if "param" in self.kinds:
            still = self._params_stay(frame)
            alerts += self._count(frame, "all parameters", "param", still, 0.0, "unchanged by the optimizer step", "parameters that change")
        return alerts

    def _count(self, frame: Frame, name: str, kind: str, stays: bool | None, value: float, what: str, expected: str) -> list[Alert]:
        if stays is None:
            return []
        self._same[name] = n = self._same.get(name, 0) + 1 if stays else 0
        if n == 0 or n % self.args.patience or any(pattern in name for pattern in self.args.exclude):
            return []
        seen = f"{what} for {n} monitored steps" + (f" (value {value!r})" if kind == "loss" else "")
        return [scalar_alert(frame, name, kind, rule=self, value=value, expected=expected, seen=seen)]

    def _loss_stays(self, name: str, value: float) -> bool | None:
        if not math.isfinite(value):
            return None  # rule nan_inf
        last = self._losses.get(name)
        self._losses[name] = value
        return last == value

    def _params_stay(self, frame: Frame) -> bool | None:
        rows = self._rows_of(frame, "param_updated")
        if not len(rows):
            return None
        ints = as_int64(rows)
        if (ints[:, FLAGS] & HAS_DIGEST).all():
            now = ints[:, [COUNT, DIGEST]]
        else:
            now = ints[:, [COUNT, ZEROS, MIN, MAX, SUM, SUMSQ]]
        last, self._params = self._params, now
        if frame.scalars.get("learning_rate") == 0.0 or last is None:
            return None
        return last.shape == now.shape and bool((last == now).all())

    def _rows_of(self, frame: Frame, family: str) -> npt.NDArray[np.float64]:
        layout = self.layouts.of(frame)
        if layout is not self._layout:
            self._layout, self._families = layout, {}
        index = self._families.get(family)
        if index is None:
            chosen = [s for s in frame.samples if s.family == family and s.ref.row >= 0]
            if family == "param_updated":
                chosen = [s for s in chosen if FINER_COPY not in s.extra]
            index = np.array([s.ref.row for s in chosen], np.intp)
            self._families[family] = index
        return frame.rows[index]
