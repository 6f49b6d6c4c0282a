"""Rule ``rate_jump``: the learning rate leaves its own schedule upwards, or a resumed run begins its schedule anew."""

from __future__ import annotations

import math
from dataclasses import dataclass

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import UPDATES_MADE, Frame
from msprobe_engine.probe.rules.alert_factory import number, scalar_alert
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.stateful_rule import LastingRule

_FIRST = 3
"""Steps of a run in which a rate that was loaded may give way to that of a new schedule."""
_RISES = 5
"""Steps in a row in which it has to rise, and be no schedule that restarts at once."""
_MORE = 2.0
"""Times the square of the growth of the count of updates that a rate has to grow by: a warm-up that is rightly gone on with, linear or the
first half of a cosine, grows by less."""


@dataclass(frozen=True, kw_only=True)
class RateJumpArgs(LastingArgs):
    times: float = arg(4.0, "fires when the learning rate is more than so many times the largest one before", above=1.0)
    warmup: int = arg(10, "steps at the beginning of the run in which it may rise by as much as it likes", minimum=1)
    rise: float = arg(5.0, "fires when a resumed run warms up again, from its first steps on, to so many times its first rate", above=1.0)


class RateJumpRule(LastingRule[RateJumpArgs]):
    """Warnings when the number ``learning_rate`` of the step is more than `times` the largest one of all steps before, `warmup` of them at
    least. A schedule that restarts comes back to its top, and one that warms up rises by small steps; neither fires. But it does where the
    optimizer has made updates before the run (number ``updates_made``) and the rate rises step by step, by `rise` times or more, from one
    of the first three steps on: a warm-up that goes on rises by no more than the count of updates."""

    name = "rate_jump"
    fires = "the learning rate is more than `times` the largest one of all steps before; or a resumed run warms up again"
    meaning = (
        "The schedule is broken: steps counted wrongly, a resumed run with another schedule or without the state of its scheduler, a rate "
        "scaled once more."
    )
    next = "look at the scheduler and at what was loaded; compare the settings of the runs with config_check"
    all_kinds = ("step",)
    args_type = RateJumpArgs

    def setup(self) -> None:
        self._top = 0.0
        self._steps = 0
        self._before = -1.0
        self._lowest: tuple[float, float] | None = None
        self._risen = 0
        self._last = 0.0

    def check(self, frame: Frame) -> list[Alert]:
        rate = frame.scalars.get("learning_rate")
        if rate is None or not math.isfinite(rate) or self.left_out("learning_rate"):
            return []
        top, known = self._top, self._steps >= self.args.warmup
        self._steps += rate > 0.0
        high = known and rate > self.args.times * top > 0.0
        if not high:  # what is too high is no measure of what comes after it
            self._top = max(top, rate)

        def words() -> tuple[str, str]:
            return f"at most {number(self.args.times * top)}", f"value {number(rate)}, {number(rate / top)} times the largest one before"

        return self.say_number(frame, "learning_rate", high, rate, words) or self._warms_up_again(frame, rate)

    def _warms_up_again(self, frame: Frame, rate: float) -> list[Alert]:
        """Of a run that goes on from a checkpoint: does its rate rise as at the beginning of a training? Said once."""
        made = frame.scalars.get(UPDATES_MADE)
        if made is None or self._before == 0.0:
            return []
        if self._before < 0.0:
            self._before = made if made > self.args.warmup else 0.0
        lowest, self._last, last = self._lowest, rate, self._last
        if lowest is None or (rate < last and self._steps <= _FIRST):
            self._lowest, self._risen = (rate, made), 0
            return []
        if rate <= last:
            self._before = 0.0  # it has come to its top, or does not rise: it goes on as it should
            return []
        self._risen += 1
        times = rate / lowest[0] if lowest[0] > 0.0 else math.inf
        if self._risen < _RISES or times < max(self.args.rise, _MORE * (made / lowest[1]) ** 2):
            return []
        before, self._before = self._before, 0.0
        seen = f"rises step by step from {number(lowest[0])} to {number(rate)}, in a run that goes on after {number(before)} updates"
        return [scalar_alert(frame, "learning_rate", "step", rule=self, value=rate, expected="no second warm-up", seen=seen)]
