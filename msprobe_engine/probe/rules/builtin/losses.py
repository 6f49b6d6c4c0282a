"""Rules ``loss_not_finite`` and ``loss_spike``."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.rules.alert_factory import number, scalar_alert
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.base import ORDER
from msprobe_engine.probe.rules.kinds import scalar_kind
from msprobe_engine.probe.rules.stateful_rule import LastingRule
from msprobe_engine.probe.rules.tracked_series import Episodes

_SLOT = np.zeros(1, np.intp)


@dataclass(frozen=True, kw_only=True)
class LossNotFiniteArgs(LastingArgs):
    """Arguments of the rule."""


class LossNotFiniteRule(LastingRule[LossNotFiniteArgs]):
    """Critical alerts for a loss that is NaN or Inf."""

    name = "loss_not_finite"
    fires = "the loss is NaN or Inf"
    severity = "critical"
    meaning = "The forward pass overflowed, or the parameters are not finite any more since an earlier update."
    next = f"{ORDER}. If parameters are NaN at the beginning of the step, the fault is in the step before"
    all_kinds = ("loss",)
    args_type = LossNotFiniteArgs

    def setup(self) -> None:
        self._episodes: dict[str, Episodes] = {}

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame."""
        alerts: list[Alert] = []
        for name, value in frame.scalars.items():
            if scalar_kind(name) != "loss" or self.left_out(name):
                continue
            episodes = self._episodes.setdefault(name, Episodes(self.args.patience, self.args.recovery))
            found = episodes.update(np.array([not math.isfinite(value)]), _SLOT)
            alerts += self.say(
                frame,
                found,
                lambda _slot, name=name: name,  # type: ignore[misc]
                lambda _episode, name=name, value=value: scalar_alert(  # type: ignore[misc]
                    frame,
                    name,
                    "loss",
                    rule=self,
                    value=value,
                    expected="a finite number",
                    seen=f"value {value}",
                ),
            )
        return alerts


@dataclass(frozen=True, kw_only=True)
class LossSpikeArgs(LastingArgs):
    """Arguments of the rule."""

    threshold: float = arg(8.0, "fires so many standard deviations (by the median deviation) above the median of the window", above=0.0)
    rise: float = arg(0.2, "and so far above the median, as a part of it", minimum=0.0)
    share: float = arg(0.05, "and by at least this part of the median that the run began with", minimum=0.0)
    window: int = arg(100, "losses that are kept", minimum=8)
    warmup: int = arg(20, "losses seen before the rule may fire", minimum=5)


class LossSpikeRule(LastingRule[LossSpikeArgs]):
    """Warnings for a loss far above the median of its last `window` values. A spike does not enter the window, unless the loss stays
    up for half of it."""

    name = "loss_spike"
    fires = "the loss is far above the median of its last steps, measured by their scatter"
    meaning = "A bad batch, a learning rate that is too high, or an update that was too large a step or two earlier."
    next = (
        "look for an update_norm_doubling or exploding_gradient alert in the steps before: with one it is the optimizer, "
        "without one the data of this step"
    )
    all_kinds = ("loss",)
    args_type = LossSpikeArgs

    def setup(self) -> None:
        self._past: dict[str, _Past] = {}

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame."""
        alerts: list[Alert] = []
        if not frame.complete:
            return alerts
        for name, value in frame.scalars.items():
            if scalar_kind(name) != "loss" or not math.isfinite(value) or self.left_out(name):
                continue
            past = self._past.get(name)
            if past is None:
                past = self._past[name] = _Past(self.args)
            limit = past.limit(value)
            bad = value > limit
            found = past.episodes.update(np.array([bad]), _SLOT)
            past.take(value, bad)
            alerts += self.say(
                frame,
                found,
                lambda _slot, name=name: name,  # type: ignore[misc]
                lambda _episode, name=name, value=value, past=past, limit=limit: scalar_alert(  # type: ignore[misc]
                    frame,
                    name,
                    "loss",
                    rule=self,
                    value=value,
                    expected=f"at most {number(limit)}",
                    seen=f"value {number(value)}, the median of its last {len(past.values)} values is {number(past.median)}",
                ),
            )
        return alerts


class _Past:
    """The last values of one loss."""

    def __init__(self, args: LossSpikeArgs) -> None:
        self.args = args
        self.values: deque[float] = deque(maxlen=args.window)
        self.episodes = Episodes(args.patience, args.recovery)
        self.median = math.nan
        self._start = math.nan
        self._high: list[float] = []

    def limit(self, value: float) -> float:
        """Largest value that is no spike; Inf while there is too little to go by, and where `value` is none in any case: a value of the
        window was as large."""
        args = self.args
        if len(self.values) < args.warmup or (value <= max(self.values) and not math.isnan(self._start)):
            return math.inf
        values = np.array(self.values)
        self.median = float(np.median(values))
        if math.isnan(self._start):
            self._start = abs(self.median)
        # Around a line through both halves: a loss that falls fast has not more scatter for that.
        half = len(values) // 2
        slope = (float(np.median(values[-half:])) - float(np.median(values[:half]))) / (len(values) - half)
        rest = values - slope * np.arange(len(values))
        scatter = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
        return self.median + max(args.threshold * scatter, args.rise * abs(self.median), args.share * self._start)

    def take(self, value: float, spike: bool) -> None:
        """Keep a value."""
        if not spike:
            self._high.clear()
            self.values.append(value)
            return
        self._high.append(value)
        if 2 * len(self._high) >= self.args.window:  # no spike any more but the new level
            self.values.extend(self._high)
            self._high.clear()
