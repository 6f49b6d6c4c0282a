"""Rules ``loss_not_finite`` and ``loss_spike``."""

from __future__ import annotations

import functools
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import UPDATED_BY, UPDATES_MADE, Frame
from msprobe_engine.core.statistics.columns import Column
from msprobe_engine.probe.rules.alert_factory import number
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.base import ORDER
from msprobe_engine.probe.rules.stateful_rule import LastingRule
from msprobe_engine.probe.rules.tensor_kinds import scalar_kind
from msprobe_engine.probe.rules.tracked_series import Episodes

_FROM_TWO, _FROM_ONE = 1.5, 1.0
"""Losses of a row are so much further from the first two of the run than from each other, in powers of their ratios, or all losses from
the first one: else it is of their scatter. One loss that is small by chance is no level: small batches scatter by as much."""
_ALONE = 2.0
"""So many times `start` the first loss, where it is the level alone."""
_RUNS = 2
"""So often losses were as high and low again that it is nothing new: tasks that take turns, a target network that is renewed."""
_CLIMB = 0.5
"""A loss that climbs evenly by this part over the lowest level of the run is no spike where the line says so: that of a critic whose
returns grow. One that goes on climbing is."""


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
        alerts: list[Alert] = []
        for name, value in frame.scalars.items():
            if scalar_kind(name) != "loss" or self.left_out(name):
                continue
            episodes = self._episodes.setdefault(name, Episodes(self.args.patience, self.args.recovery))
            words = ("a finite number", f"value {value}")
            alerts += self.say_number(frame, name, not math.isfinite(value), value, lambda words=words: words, episodes=episodes)  # type: ignore[misc]
        return alerts


@dataclass(frozen=True, kw_only=True)
class LossSpikeArgs(LastingArgs):
    threshold: float = arg(8.0, "fires so many standard deviations (by the median deviation) above the median of the window", above=0.0)
    rise: float = arg(0.2, "and so far above the median, as a part of it", minimum=0.0)
    share: float = arg(0.05, "and by at least this part of the median that the run began with", minimum=0.0)
    window: int = arg(100, "losses that are kept", minimum=8)
    warmup: int = arg(20, "losses seen before the median counts as known", minimum=5)
    start: float = arg(1.5, "until then it fires when `row` losses in a row are more than so many times the first two", above=1.0)
    row: int = arg(5, "see `start`; or all losses since the first are more than twice so many times that one", minimum=2)
    least: float = arg(0.25, "smaller first losses are no level to go by: reinforcement and contrastive learning", minimum=0.0)
    fall: float = arg(0.5, "fires below this part of all losses of the window, too, if that is `threshold` deviations off", above=0.0)


class LossSpikeRule(LastingRule[LossSpikeArgs]):
    """Warnings for a loss far above the median of its last `window` values (of steps in which the same optimizers update), or of the high
    ones of them, if it rises and falls again (tasks that take turns). A spike does not enter the window, unless the loss stays up for half
    of it; one that is not twice as high as two before it is no news. Before there is a median, for losses that stay far above the first
    ones: a model that has learned nothing is no worse. And for a loss that falls far below all others at once."""

    name = "loss_spike"
    fires = (
        "the loss is far above the median of its last steps, measured by their scatter, and above what it has risen to again and again; or "
        "all at once far below them"
    )
    meaning = (
        "A bad batch, a learning rate that is too high, or an update that was too large a step or two earlier. Far below: other data, no "
        "label left, or a loss that is divided otherwise."
    )
    next = (
        "look for an update_norm_doubling or exploding_gradient alert in the steps before: with one it is the optimizer, "
        "without one the data of this step"
    )
    all_kinds = ("loss",)
    args_type = LossSpikeArgs

    def setup(self) -> None:
        self._past: dict[tuple[str, float], _Past] = {}

    def check(self, frame: Frame) -> list[Alert]:
        alerts: list[Alert] = []
        if not frame.complete:
            return alerts
        if frame.scalars.get(UPDATES_MADE) == 0.0:  # of an optimizer of other parameters: another model has another loss
            self._past.clear()
        for name, value in frame.scalars.items():
            if scalar_kind(name) != "loss" or not math.isfinite(value) or self.left_out(name):
                continue
            key = name, frame.facts.get(UPDATED_BY, 0.0)
            past = self._past.get(key)
            if past is None:
                past = self._past[key] = _Past(self.args)
            limit = past.limit(value)
            low, early = past.falls(value), past.is_early
            bad = value > limit or low
            past.add(value, bad and not early)
            words = functools.partial(self._words, past, value, limit, low, early)
            alerts += self.say_number(frame, name, bad, value, words, episodes=past.episodes)
        return alerts

    def _words(self, past: _Past, value: float, limit: float, low: bool, early: bool) -> tuple[str, str]:
        usual = f"the median of {past.of}its last {len(past.values)} values is {number(past.median)}"
        seen = f"{self.args.row} in a row are far above the first {past.counted}, {number(past.first)}" if early else usual
        return f"at least {number(past.least)}" if low else f"at most {number(limit)}", f"value {number(value)}, {seen}"


class _Past:
    """The last values of one loss."""

    def __init__(self, args: LossSpikeArgs) -> None:
        self.args = args
        self.values: deque[float] = deque(maxlen=args.window)
        self.episodes = Episodes(args.patience, args.recovery)
        self.median = self.first = self.least = math.nan
        self.counted = self.of = ""
        self.is_early = True
        self._start = math.nan
        self._floor = math.inf
        self._high: list[float] = []
        self._peaks = [-math.inf] * _RUNS

    def limit(self, value: float) -> float:
        """Largest value that is no spike; Inf while there is too little to go by, and where `value` is none in any case: a value of the
        window was as large."""
        args = self.args
        self.is_early = len(self.values) < args.warmup
        if self.is_early:
            seen = [*self.values, value]
            # of a row that begins later the first two are the level; of all losses but the first, that one
            for first, row, power, self.counted in (
                (seen[:2], seen[2:][-args.row :], _FROM_TWO, "two, at most"),
                (seen[:1], seen[1:], _FROM_ONE, "one"),
            ):
                self.first = max(first)
                limit = args.start * self.first * (_ALONE if len(first) == 1 else 1.0)
                if len(row) >= args.row and min(first) >= args.least and self._is_far(row, limit, power):
                    return limit
            return math.inf
        if value <= max(self.values) and not math.isnan(self._start):
            return math.inf
        values = np.array(self.values)
        limit = self._above(values)
        self.of, high = "", values > limit
        while np.count_nonzero(np.diff(high.astype(np.int8), append=0) < 0) >= _RUNS:
            self.of, values = "the high ones of ", values[high]
            limit = self._above(values)
            high = values > limit
        return max(limit, self.median + 2.0 * (self._peaks[0] - self.median))

    def _above(self, values: Column) -> float:
        """What is no spike against these values."""
        args = self.args
        self.median, scatter, expected = _usual(values)
        if math.isnan(self._start):
            self._start = abs(self.median)
        first = float(np.median(values[: len(values) // 2]))
        self._floor = min(self._floor, first)
        climbed = max(self.median, min(expected, self._floor + _CLIMB * abs(self._floor)))
        return climbed + max(args.threshold * scatter, args.rise * abs(self.median), args.share * self._start)

    def _is_far(self, row: list[float], limit: float, power: float) -> bool:
        return min(row) > limit and min(row) > self.first * (max(row) / min(row)) ** power

    def falls(self, value: float) -> bool:
        """Whether it is far below everything in the window."""
        args = self.args
        if self.is_early:
            return False
        smallest, (median, scatter, expected) = min(self.values), _usual(np.array(self.values))
        # a loss that goes below 0 has no part of itself to go by: it is held to how far it went within the window
        self.least = smallest - (1.0 - args.fall) * (smallest if value >= 0.0 else max(abs(smallest), max(self.values) - smallest))
        if not value < min(self.least, min(median, expected) - args.threshold * scatter):
            return False
        self.of, self.median = "", median
        return True

    def add(self, value: float, spike: bool) -> None:
        if not spike:
            self._peaks = sorted([*self._peaks, max(self._high, default=-math.inf)])[-_RUNS:]
            self._high.clear()
            self.values.append(value)
            return
        self._high.append(value)
        if 2 * len(self._high) >= self.args.window:  # no spike any more but the new level
            self.values.extend(self._high)
            self._high.clear()


def _usual(values: Column) -> tuple[float, float, float]:
    """Median, deviation around a line through both halves (a loss that falls fast has not more scatter for that), and what that line says
    of the next value."""
    half = len(values) // 2
    slope = (float(np.median(values[-half:])) - float(np.median(values[:half]))) / (len(values) - half)
    rest = values - slope * np.arange(len(values))
    level = float(np.median(rest))
    return float(np.median(values)), 1.4826 * float(np.median(np.abs(rest - level))), level + slope * len(values)
