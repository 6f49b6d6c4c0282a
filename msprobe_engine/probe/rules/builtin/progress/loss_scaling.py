"""Rules ``loss_scale_collapse`` and ``skipped_updates``: mixed-precision training that does not get anywhere."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.rules.alert_factory import number
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.stateful_rule import LastingRule


@dataclass(frozen=True, kw_only=True)
class LossScaleArgs(LastingArgs):
    falls: int = arg(4, "fires when the scale fell so often within the window", minimum=2)
    window: int = arg(20, "steps that are looked back", minimum=2)
    floor: float = arg(1.0, "fires when the scale has come down to this", minimum=0.0)
    warmup: int = arg(100, "steps at the beginning of the run in which the scale is still looked for", minimum=0)


class LossScaleRule(LastingRule[LossScaleArgs]):
    """Warnings when the number ``loss_scale`` of the step falls `falls` times within `window` steps, or down to `floor`. A scale that
    never was above `floor` is a fixed one."""

    name = "loss_scale_collapse"
    fires = "the loss scale falls again and again, or down to `floor`"
    meaning = "Gradients overflow at every scale: there are NaN in the model, not values that are merely too large."
    next = "look at the alerts of nan_inf in the skipped steps; the first tensor named is the cause"
    all_kinds = ("step",)
    args_type = LossScaleArgs

    def setup(self) -> None:
        self._falls: deque[bool] = deque(maxlen=self.args.window)
        self._last = math.nan
        self._top = 0.0
        self._steps = 0

    def check(self, frame: Frame) -> list[Alert]:
        scale = frame.scalars.get("loss_scale")
        if scale is None or not math.isfinite(scale) or self.left_out("loss_scale"):
            return []
        self._steps += 1
        self._falls.append(scale < self._last)
        self._last, self._top = scale, max(self._top, scale)
        falls = sum(self._falls) if self._steps > self.args.warmup else 0
        low = scale <= self.args.floor < self._top

        def words() -> tuple[str, str]:
            expected = f"above {number(self.args.floor)}" if low else f"fewer than {self.args.falls} falls in {self.args.window} steps"
            return expected, f"value {number(scale)}, down from {number(self._top)}" + (f", fell {falls} times" if falls else "")

        return self.say_number(frame, "loss_scale", low or falls >= self.args.falls, scale, words)


@dataclass(frozen=True, kw_only=True)
class SkippedUpdatesArgs(LastingArgs):
    row: int = arg(4, "fires after so many skipped updates in a row", minimum=1)
    share: float = arg(0.2, "fires when more than this share of the window was skipped", above=0.0)
    window: int = arg(50, "steps that are looked back", minimum=2)
    warmup: int = arg(50, "steps at the beginning, while a loss scale other than 1 is looked for", minimum=0)


class SkippedUpdatesRule(LastingRule[SkippedUpdatesArgs]):
    """Warnings when the optimizer skips `row` updates in a row, or more than `share` of a full window (number ``skipped`` of the step)."""

    name = "skipped_updates"
    fires = "too many updates are skipped"
    meaning = "The optimizer finds Inf or NaN in the gradients and drops the step: training stands still while time goes by."
    next = "look at the alerts of nan_inf in the skipped steps, and at the loss scale"
    all_kinds = ("step",)
    args_type = SkippedUpdatesArgs

    def setup(self) -> None:
        self._past: deque[bool] = deque(maxlen=self.args.window)
        self._steps = 0
        self._row = 0

    def check(self, frame: Frame) -> list[Alert]:
        skipped = frame.scalars.get("skipped")
        if skipped is None or self.left_out("skipped"):
            return []
        self._steps += 1
        if self._steps <= self.args.warmup and frame.scalars.get("loss_scale", 1.0) != 1.0:
            return []
        self._past.append(skipped > 0.0)
        self._row = self._row + 1 if skipped > 0.0 else 0
        count = sum(self._past)
        often = len(self._past) == self.args.window and count > self.args.share * self.args.window

        def words() -> tuple[str, str]:
            expected = f"fewer than {self.args.row} in a row and at most {number(100.0 * self.args.share)} %"
            return expected, f"{self._row} updates in a row skipped, {count} of the last {len(self._past)}"

        return self.say_number(frame, "skipped", often or self._row >= self.args.row, float(count), words)
