"""Rule ``rate_jump``: the learning rate leaves its own schedule upwards."""

from __future__ import annotations

import math
from dataclasses import dataclass

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.rules.alert_factory import number
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.stateful_rule import LastingRule


@dataclass(frozen=True, kw_only=True)
class RateJumpArgs(LastingArgs):
    times: float = arg(4.0, "fires when the learning rate is more than so many times the largest one before", above=1.0)
    warmup: int = arg(10, "steps at the beginning of the run in which it may rise by as much as it likes", minimum=1)


class RateJumpRule(LastingRule[RateJumpArgs]):
    """Warnings when the number ``learning_rate`` of the step is more than `times` the largest one of all steps before, `warmup` of them at
    least. A schedule that restarts comes back to its top, and one that warms up rises by small steps; neither fires."""

    name = "rate_jump"
    fires = "the learning rate is more than `times` the largest one of all steps before"
    meaning = "The schedule is broken: steps counted wrongly, a resumed run with another schedule, a rate scaled once more."
    next = "look at the scheduler and at what was loaded; compare the settings of the runs with config_check"
    all_kinds = ("step",)
    args_type = RateJumpArgs

    def setup(self) -> None:
        self._top = 0.0
        self._steps = 0

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

        return self.say_number(frame, "learning_rate", high, rate, words)
