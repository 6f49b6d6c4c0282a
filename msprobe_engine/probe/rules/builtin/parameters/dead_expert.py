"""Rule ``dead_expert``: one expert of a mixture gets nothing while the others work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import NO_GRADIENT, Frame, Sample
from msprobe_engine.core.statistics.columns import Column
from msprobe_engine.core.statistics.rows import SUM
from msprobe_engine.probe.rules.alert_factory import note_rest, number, scalar_alert
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.stateful_rule import LastingRule
from msprobe_engine.probe.rules.tensor_kinds import KINDS
from msprobe_engine.probe.rules.tracked_series import Episode, Mask, Slots, View, Watch

EXPERT = re.compile(r"(.*experts?)\.([0-9]+)(?:\.|$)")
COLUMN = "dead_experts"
"""Number of a router's features: how many of its experts get no token."""
_GRAD = KINDS.index("grad")
_FEATURE = KINDS.index("feature")


@dataclass(frozen=True, kw_only=True)
class DeadExpertArgs(LastingArgs):
    warmup: int = arg(20, "monitored steps in which the usual number of experts without tokens of a router is found", minimum=1)
    patience: int = arg(20, "monitored steps in a row before the rule fires", minimum=1)
    never: int = arg(7, "monitored steps for an expert that never had a gradient while all others of its layer had one in each", minimum=1)


class DeadExpertRule(LastingRule[DeadExpertArgs]):
    """Warnings for experts without gradient (none, or exact zeros in all their weights) while another expert of the same
    layer has some; and for routers with more experts without tokens than in the first `warmup` steps. Few tokens for many experts
    leave some of them out in a healthy run, too. An expert that never had a gradient while every other one of the layer had one in each
    step is said after `never`.

    Experts are told by their names (``...experts.3.w1.weight``). Weights of several experts in one tensor cannot be told apart by
    gradients; their router's load can (``monitor.layer_features.router_logits``).
    """

    name = "dead_expert"
    fires = "an expert gets no token or no gradient for `patience` monitored steps while its neighbours do"
    meaning = "The router has stopped to use the expert; without a balancing loss it will not come back."
    next = "check the balancing loss and the router's logits (`monitor.layer_features.router_logits`)"
    all_kinds = ("grad", "feature")
    args_type = DeadExpertArgs

    def setup(self) -> None:
        self._watch = Watch(self.layouts, self._key)
        self._layers: dict[str, int] = {}
        self._layer: Slots = np.zeros(0, np.intp)
        self._router: Mask = np.zeros(0, np.bool_)
        self._usual: Column = np.zeros(0)
        self._steps: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._never: dict[str, tuple[int, bool]] = {}

    def _key(self, sample: Sample) -> str | None:
        if self.left_out(sample.name):
            return None
        if sample.family == "moe_router_logit_hook":
            wanted = "feature" in self.kinds and sample.extra.get("column") == COLUMN
            return f"{sample.vpp_stage} router {sample.name}" if wanted else None
        # Parameters count as names only: they say which experts there are besides those that have a gradient.
        if "grad" in self.kinds and (sample.family.startswith("param_") or (sample.family == "grad_reduced" and sample.phase != "clipped")):
            match = EXPERT.match(sample.name)
            return f"{sample.vpp_stage} gradient {match[1]}.{match[2]}" if match else None
        return None

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame; a skipped step is not looked at."""
        view = self._watch.of(frame) if frame.complete and not frame.skipped else None
        if view is None:
            return []
        for key in self._watch.names[len(self._layer) :]:
            router = " router " in key
            layer = self._layers.setdefault(key if router else key.rpartition(".")[0], len(self._layers))
            self._layer, self._router = np.append(self._layer, layer), np.append(self._router, router)
        table = view.table
        kinds = table.layout.kinds
        counts = (kinds == _GRAD) | (kinds == _FEATURE)
        some = view.total((table.count - table.zeros) * counts) > 0
        alive = np.where(self._router, ~self._find_starving(view), some)
        neighbours = np.bincount(self._layer, some, len(self._layers))[self._layer] > 0
        is_present = np.zeros(view.size, np.bool_)
        is_present[view.seen] = True
        judged = np.flatnonzero(np.where(self._router, is_present, neighbours))
        episodes = self.episodes.update(~alive[judged], judged)

        return [*self._describe_episodes(frame, view, episodes), *self._never_used(frame, some)]

    def _never_used(self, frame: Frame, some: Mask) -> list[Alert]:
        """Experts that are trained and never had a gradient: no sample is of them."""
        idle = {f"{m[1]}.{m[2]}" for name, why in frame.untrained.items() if why == NO_GRADIENT and (m := EXPERT.match(name)) is not None}
        if not idle:
            return []
        others: dict[str, list[bool]] = {}
        for slot, key in enumerate(self._watch.names):
            if not self._router[slot]:
                expert = key.split(" ", 2)[2]
                idle.discard(expert)  # it had one before
                others.setdefault(expert.rpartition(".")[0], []).append(bool(some[slot]))
        alerts = []
        for expert in sorted(idle):
            busy = others.get(expert.rpartition(".")[0], [])
            if not any(busy) or self.left_out(expert):
                continue
            steps, all_busy = self._never.get(expert, (0, True))
            self._never[expert] = steps, all_busy = steps + 1, all_busy and all(busy)
            if steps == (self.args.never if all_busy else self.args.patience):
                seen = f"no gradient for {steps} monitored steps, nor any before"
                expected = "some gradient, as other experts of the layer have"
                alerts.append(scalar_alert(frame, expert, "grad", rule=self, value=0.0, expected=expected, seen=seen))
        return note_rest(alerts[: self.args.max_alerts], len(alerts))

    def _find_starving(self, view: View) -> Mask:
        """Routers with more experts without tokens than at the beginning, by slot."""
        size = view.size - len(self._usual)
        self._usual, self._steps = np.append(self._usual, np.zeros(size)), np.append(self._steps, np.zeros(size, np.int64))
        dead = view.spread(np.where(view.table.finite, view.table.rows[:, SUM], 0.0))
        young = self._steps < self.args.warmup
        over: Mask = ~young & (dead > self._usual)
        self._usual = np.where(young, np.maximum(self._usual, dead), self._usual)
        self._steps[view.seen] += 1
        return over

    def _describe_episodes(self, frame: Frame, view: View, episodes: Sequence[Episode]) -> list[Alert]:
        table = view.table

        def name(slot: int) -> str:
            return self._watch.names[slot].split(" ", 2)[2]

        def describe(episode: Episode) -> Alert:
            router = bool(self._router[episode.slot])
            place = self._watch.first[episode.slot]
            dead = float(table.rows[place, SUM]) if router else 1.0
            return scalar_alert(
                frame,
                name(episode.slot),
                "feature" if router else "grad",
                rule=self,
                value=dead if router else 0.0,
                expected=f"at most {number(float(self._usual[episode.slot]))}, as at the beginning"
                if router
                else "some gradient, as other experts of the layer have",
                seen=(f"{number(dead)} experts without tokens, too many for" if router else "no gradient for")
                + f" {episode.steps} monitored steps",
                order=int(table.layout.order[place]),
            )

        return self.build_alerts(frame, episodes, name, describe)
