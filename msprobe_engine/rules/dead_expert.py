"""Rule ``dead_expert``: one expert of a mixture gets nothing while the others work."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from msprobe_engine.records import Frame, Sample
from msprobe_engine.rules.args import LastingArgs, arg
from msprobe_engine.rules.base import Alert
from msprobe_engine.rules.common import scalar_alert
from msprobe_engine.rules.kinds import KINDS
from msprobe_engine.rules.lasting import LastingRule
from msprobe_engine.rules.watching import Episode, Slots, Watch

_EXPERT = re.compile(r"(.*experts?)\.([0-9]+)(?:\.|$)")
_LOAD = re.compile(r"(?:expert_?)?load[_.]?([0-9]+)|expert[_.]?([0-9]+)(?:[_.]load)?")
_GRAD = KINDS.index("grad")
_FEATURE = KINDS.index("feature")


@dataclass(frozen=True, kw_only=True)
class DeadExpertArgs(LastingArgs):
    """Arguments of the rule."""

    patience: int = arg(20, "monitored steps in a row before the rule fires", minimum=1)


class DeadExpertRule(LastingRule[DeadExpertArgs]):
    """Warnings for experts without gradient (none, or exact zeros in all their weights) or without load, while another expert of the
    same layer has some.

    Experts are told by their names (``...experts.3.w1.weight``). Weights of several experts in one tensor cannot be told apart by
    gradients; their router's load can (``monitor.layer_features.router_logits``).
    """

    name = "dead_expert"
    all_kinds = ("grad", "feature")
    args_type = DeadExpertArgs

    def setup(self) -> None:
        self._watch = Watch(self.layouts, self._key)
        self._layers: dict[str, int] = {}
        self._layer: Slots = np.zeros(0, np.intp)

    def _key(self, sample: Sample) -> str | None:
        if self.left_out(sample.name):
            return None
        if sample.family == "moe_router_logit_hook" and "feature" in self.kinds:
            found = _LOAD.fullmatch(str(sample.extra.get("column", "")))
            return f"{sample.vpp_stage} load {sample.name}.{found[1] or found[2]}" if found else None
        # Parameters count as names only: they say which experts there are besides those that have a gradient.
        if "grad" in self.kinds and (sample.family.startswith("param_") or (sample.family == "grad_reduced" and sample.phase != "clipped")):
            found = _EXPERT.match(sample.name)
            return f"{sample.vpp_stage} gradient {found[1]}.{found[2]}" if found else None
        return None

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame; a skipped step is not looked at."""
        view = self._watch.of(frame) if frame.complete and not frame.scalars.get("skipped", 0.0) > 0.0 else None
        if view is None:
            return []
        for key in self._watch.names[len(self._layer) :]:
            layer = self._layers.setdefault(key.rpartition(".")[0], len(self._layers))
            self._layer = np.append(self._layer, layer)
        table = view.table
        kinds = table.layout.kinds
        counts = (kinds == _GRAD) | (kinds == _FEATURE)
        alive = view.total((table.count - table.zeros) * counts) > 0
        neighbours = np.bincount(self._layer, alive, len(self._layers))[self._layer] > 0
        judged = np.flatnonzero(neighbours)
        found = self.episodes.update(~alive[judged], judged)

        def name(slot: int) -> str:
            return self._watch.names[slot].split(" ", 2)[2]

        def describe(episode: Episode) -> Alert:
            load = " load " in self._watch.names[episode.slot]
            return scalar_alert(
                frame,
                name(episode.slot),
                "feature" if load else "grad",
                rule=self.name,
                severity=self.severity,
                value=0.0,
                expected=f"some {'load' if load else 'gradient'}, as other experts of the layer have",
                seen=f"no {'tokens' if load else 'gradient'} for {episode.steps} monitored steps",
                order=int(table.layout.order[self._watch.first[episode.slot]]),
            )

        return self.say(frame, found, name, describe)
