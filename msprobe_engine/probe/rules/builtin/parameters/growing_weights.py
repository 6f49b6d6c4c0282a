"""Rule ``growing_weights``: the first updates are far larger than the weights."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import WEIGHTS_GROWN, Frame
from msprobe_engine.probe.rules.alert_factory import number, scalar_alert
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.stateful_rule import LastingRule

_LOSSES = 5
"""Last losses whose median is held against the first one."""


@dataclass(frozen=True, kw_only=True)
class GrowingWeightsArgs(LastingArgs):
    times: float = arg(10.0, "fires when the weights are so many times as large as before the first update", above=1.0)


class GrowingWeightsRule(LastingRule[GrowingWeightsArgs]):
    """A warning, once, when within the first 100 steps of the run the weights become `times` as large as they were (told
    of a sample of the elements of some matrices, in the median) and the loss has gained nothing by it: the median of its
    last five values is not below the first one. Weights that begin near zero grow by as much in a healthy run, and its loss falls."""

    name = "growing_weights"
    fires = "within the first 100 steps the weights become `times` as large as they were, and the loss is not below the first one"
    meaning = "The learning rate is too high by far, as by a mistake of its unit: each update is as large as the weights, or larger."
    next = (
        "look at the learning rate of the first steps (`learning_rate` in the files of the monitor) and at its schedule; try a tenth of it"
    )
    all_kinds = ("param",)
    args_type = GrowingWeightsArgs

    def setup(self) -> None:
        self._first = math.nan
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._said = False

    def check(self, frame: Frame) -> list[Alert]:
        loss, grown = frame.scalars.get("loss"), frame.facts.get(WEIGHTS_GROWN)
        if self._said or not frame.complete:
            return []
        if loss is not None and math.isfinite(loss):
            self._first = loss if math.isnan(self._first) else self._first
            self._losses.append(loss)
        if grown is None or grown < self.args.times or len(self._losses) < _LOSSES or self.left_out(WEIGHTS_GROWN):
            return []
        now = median(self._losses)
        if now < self._first:
            return []
        self._said = True
        seen = f"weights are {number(grown)} times as large as at first, and the loss is {number(now)} after {number(self._first)}"
        expected = f"less than {number(self.args.times)} times"
        return [scalar_alert(frame, WEIGHTS_GROWN, "param", rule=self, value=grown, expected=expected, seen=seen)]
