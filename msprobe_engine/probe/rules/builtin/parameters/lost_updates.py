"""Rule ``lost_updates``: the update of most elements is smaller than what their number format can hold."""

from __future__ import annotations

from dataclasses import dataclass

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import UPDATES_LOST, Frame
from msprobe_engine.probe.rules.alert_factory import number
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.stateful_rule import LastingRule

_DECAYED = 0.5
"""Share of the largest learning rate at which the schedule has made updates small."""


@dataclass(frozen=True, kw_only=True)
class LostUpdatesArgs(LastingArgs):
    share: float = arg(0.5, "fires when more than this part of the elements with a gradient stays as it is", above=0.0)
    patience: int = arg(3, "monitored steps in a row before the rule fires", minimum=1)


class LostUpdatesRule(LastingRule[LostUpdatesArgs]):
    """Warnings when updates leave most elements of the parameters as they are (told of a sample of the
    elements). Looked at are parameters in 16 bits that an optimizer of ``torch.optim`` updates itself: these round to the nearest number
    and keep no rest. Skipped steps say nothing, and neither do those at the end of a schedule, whose updates are small on purpose."""

    name = "lost_updates"
    fires = (
        "most elements of the parameters in 16 bits stay as they are at an update, although they have a gradient and the learning rate is "
        "more than half of the largest one so far"
    )
    meaning = (
        "The update is smaller than half a unit in the last place of the weight, so that rounding takes it away, in every step anew: "
        "these weights are not trained."
    )
    next = "keep float32 weights for the optimizer (autocast, or copies), or take an optimizer that rounds at random; a larger rate helps"
    all_kinds = ("param",)
    args_type = LostUpdatesArgs

    def setup(self) -> None:
        self._largest = 0.0

    def check(self, frame: Frame) -> list[Alert]:
        rate = frame.scalars.get("learning_rate")
        self._largest = max(self._largest, rate or 0.0)
        share = frame.facts.get(UPDATES_LOST)
        if share is None or not frame.complete or frame.skipped or self.left_out(UPDATES_LOST):
            return []
        if rate is not None and rate <= _DECAYED * self._largest:
            return []

        def words() -> tuple[str, str]:
            return (
                f"at most {number(100.0 * self.args.share)} %",
                f"{number(round(100.0 * share, 1))} % of the elements with a gradient are the same after the update",
            )

        return self.say_number(frame, UPDATES_LOST, share > self.args.share, share, words)
