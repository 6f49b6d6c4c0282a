"""Rule ``extreme_value``: a finite value that no healthy run has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.core.statistics.columns import absmax
from msprobe_engine.core.statistics.rows import COUNT, MAX, MIN, NANS, NEG_INF, POS_INF, as_int64
from msprobe_engine.probe.rules.alert_factory import alert_at, is_excluded, note_rest, number, scalar_alert
from msprobe_engine.probe.rules.arguments import CommonArgs, arg
from msprobe_engine.probe.rules.base import ORDER, Rule
from msprobe_engine.probe.rules.tensor_kinds import scalar_kind
from msprobe_engine.probe.rules.uninitialised import Computed

MASK_FILL = -3.3e38
"""Values at or below this in an activation are the fill of an attention mask (the lowest float32 or bfloat16), not data."""


@dataclass(frozen=True, kw_only=True)
class ExtremeValueArgs(CommonArgs):
    threshold: float = arg(1e10, "largest allowed absolute value", above=0.0)


class ExtremeValueRule(Rule):
    """Warnings for records with a finite value whose absolute value is above `threshold`, and for such numbers of the step.

    NaN and Inf are the business of rule ``nan_inf``: they do not hide large finite values here and do not count as large. As
    there, memory that nothing has computed yet is no fault, see `computed`.
    """

    name = "extreme_value"
    fires = "a finite absolute value is above `threshold`"
    meaning = "Values near the end of a half-precision range: Inf is a step or two away."
    next = f"{ORDER}; then look at scale and normalisation in front of the named tensor"
    args_type = ExtremeValueArgs
    args: ExtremeValueArgs

    def setup(self) -> None:
        self._computed = Computed()

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame, earliest first."""
        alerts: list[Alert] = []
        if len(frame.rows) and (absmax(frame.rows) > self.args.threshold).any():
            alerts = self._tensors(frame)
        for name, value in frame.scalars.items():
            kind = scalar_kind(name)
            # A loss scale is meant to be large.
            if name == "loss_scale" or kind not in self.kinds or not math.isfinite(value) or abs(value) <= self.args.threshold:
                continue
            if not is_excluded(name, self.args.exclude):
                alerts.append(
                    scalar_alert(
                        frame,
                        name,
                        kind,
                        rule=self,
                        value=value,
                        expected=self._expected,
                        seen=f"value {number(value)}",
                    )
                )
        return alerts

    @property
    def _expected(self) -> str:
        return f"absolute values up to {number(self.args.threshold)}"

    def _tensors(self, frame: Frame) -> list[Alert]:
        layout = self.layouts.of(frame)
        rows = layout.order_rows(frame)
        limit = self.args.threshold
        ints = as_int64(rows)
        filled = ints[:, COUNT] > ints[:, NANS] + ints[:, POS_INF] + ints[:, NEG_INF]
        low = -rows[:, MIN] > limit
        low &= ~(layout.mask(("activation",)) & (rows[:, MIN] <= MASK_FILL))
        bad = filled & ((rows[:, MAX] > limit) | low) & layout.mask(self.kinds)
        hits = np.flatnonzero(bad & self._computed.of(layout)) if bad.any() else np.empty(0, np.intp)
        extreme = [i for i in hits.tolist() if not is_excluded(layout.names[i], self.args.exclude)]
        alerts = []
        for i in extreme[: self.args.max_alerts]:
            high, bottom = float(rows[i, MAX]), float(rows[i, MIN])
            value = bottom if low[i] and -bottom > high else high
            alerts.append(
                alert_at(
                    frame,
                    layout,
                    i,
                    rule=self,
                    value=value,
                    expected=self._expected,
                    seen=f"{'min' if value == bottom and value < 0 else 'max'} {number(value)}",
                )
            )
        return note_rest(alerts, len(extreme))
