"""Rule ``dead_activation``: an output that is nothing but zeros, step after step."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.probe.rules.alert_factory import alert_at, number
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.stateful_rule import LastingRule
from msprobe_engine.probe.rules.tracked_series import Episode, Watch

_OUTPUT = re.compile(r"\.output(?:_[0-9]+|\.[0-9.]+)?$")


@dataclass(frozen=True, kw_only=True)
class DeadActivationArgs(LastingArgs):
    threshold: float = arg(0.999, "share of exact zeros from which an output is dead", above=0.0)
    elements: int = arg(64, "outputs with fewer elements are not looked at", minimum=1)
    patience: int = arg(10, "monitored steps in a row before the rule fires", minimum=1)


class DeadActivationRule(LastingRule[DeadActivationArgs]):
    """Warnings for outputs of modules (floating point, family ``actv``) whose share of exact zeros is `threshold` or more. Inputs,
    and outputs that require no gradient, are not looked at: masks, padding and constants are zeros on purpose."""

    name = "dead_activation"
    fires = "an output is (almost) all exact zeros for `patience` monitored steps"
    meaning = "The units of this layer have died (a ReLU pushed below zero for good) or nothing is routed through it."
    next = "look at bias and learning rate of the layer in front; compare the share of zeros over the run in `msprobe monitor report RUN`"
    all_kinds = ("activation",)
    args_type = DeadActivationArgs

    def setup(self) -> None:
        self._watch = Watch(self.layouts, self._key)

    def _key(self, sample: Sample) -> str | None:
        if sample.family != "actv" or not _OUTPUT.search(sample.name) or self.left_out(sample.name):
            return None
        description = sample.ref.description
        if "float" not in description.dtype or description.requires_grad is False:
            return None  # constants that a module hands on (the bias of positions in T5) are zeros on purpose
        return f"{sample.vpp_stage} {sample.micro_step} {sample.name}"

    def check(self, frame: Frame) -> list[Alert]:
        view = self._watch.of(frame) if frame.complete else None
        if view is None:
            return []
        count, zeros = view.spread(view.table.count)[view.seen], view.spread(view.table.zeros)[view.seen]
        bad = (zeros >= self.args.threshold * count) & (count >= self.args.elements)
        episodes = self.episodes.update(bad, view.seen)

        def describe(episode: Episode) -> Alert:
            i = int(np.searchsorted(view.seen, episode.slot))
            share = float(zeros[i] / count[i])
            return alert_at(
                frame,
                view.table.layout,
                self._watch.first[episode.slot],
                rule=self,
                value=share,
                expected=f"less than {number(self.args.threshold)} of exact zeros",
                seen=f"{number(100.0 * share)} % exact zeros for {episode.steps} monitored steps",
            )

        return self.build_alerts(frame, episodes, lambda slot: self._watch.names[slot].split(" ", 2)[2], describe)
