"""Rule ``broken_loop``: what the program itself shows to be wrong with its loop, whatever the numbers of the training are."""

from __future__ import annotations

from dataclasses import dataclass

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import DIVIDED_TWICE, EVALUATION_MODE, GRADIENTS_KEPT, UPDATES_MADE, Frame
from msprobe_engine.probe.rules.alert_factory import number, scalar_alert
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.stateful_rule import LastingRule
from msprobe_engine.probe.rules.tracked_series import Episodes

_FACTS = {
    EVALUATION_MODE: ("a model in training mode", "trained in evaluation mode (model.eval()), which it was not before: no dropout"),
    GRADIENTS_KEPT: ("gradients that are cleared after an update", "the backward pass adds to the gradients of the update before"),
    DIVIDED_TWICE: ("losses that are divided once", "each loss was divided by the number of passes of the step, and the result once more"),
}


@dataclass(frozen=True, kw_only=True)
class BrokenLoopArgs(LastingArgs):
    recovery: int = arg(1, "monitored steps without it after which it counts as ended, which is said, too", minimum=1)


class BrokenLoopRule(LastingRule[BrokenLoopArgs]):
    """Warnings when the optimizer counts fewer updates than it did, and no more than there were steps since (number ``updates_made`` of the
    step), unless the learning rate rises from less than half of what it was: a warm-up, the program begins anew on purpose. Also when the
    model is trained in evaluation mode and was not before (``evaluation_mode``), when gradients are not cleared between two updates
    (``gradients_kept``), and when each loss is divided by the number of micro batches twice (``loss_divided_twice``)."""

    name = "broken_loop"
    fires = (
        "the optimizer has lost its state and the learning rate does not warm up anew; the model is trained in evaluation mode, in which "
        "it was not before; gradients are not cleared between two updates; or the losses of micro batches are divided by their number twice"
    )
    meaning = (
        "An optimizer was made anew, or its state was cleared; model.train() is missing behind an evaluation; zero_grad is missing; or "
        "both the loop and what it calls divide the loss."
    )
    next = "look for what the loop does before this step: what it loads and makes, an evaluation, zero_grad, where it divides the loss"
    all_kinds = ("step",)
    args_type = BrokenLoopArgs

    def setup(self) -> None:
        self._made = self._rate = self._rate_made = 0.0
        self._step = 0
        self._fine = {DIVIDED_TWICE}
        self._episodes = {name: Episodes(self.args.patience, self.args.recovery) for name in _FACTS}

    def check(self, frame: Frame) -> list[Alert]:
        alerts: list[Alert] = []
        made, before = frame.scalars.get(UPDATES_MADE), self._made
        rate, rate_before = frame.scalars.get("learning_rate", 0.0), self._rate
        self._rate = rate
        if made is not None and not self.left_out(UPDATES_MADE):
            lost = 0.0 < made < before and made <= frame.step - self._step  # 0: of other parameters; or an earlier checkpoint
            warms_up = rate_before < rate < 0.5 * self._rate_made
            self._made, self._step, self._rate_made = made, frame.step, rate
            if lost and not warms_up:
                seen = f"the optimizer counts {number(made)} updates, and {number(before)} before: its state is lost"
                alerts.append(scalar_alert(frame, UPDATES_MADE, "step", rule=self, value=made, expected="a count that grows", seen=seen))
        for name, said in _FACTS.items():
            holds = frame.scalars.get(name, frame.facts.get(name, 0.0)) > 0.0
            if not holds:
                self._fine.add(name)
            if name in self._fine and not self.left_out(name):
                alerts += self.say_number(frame, name, holds, float(holds), lambda said=said: said, episodes=self._episodes[name])  # type: ignore[misc]
        return alerts
