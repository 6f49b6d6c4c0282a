"""Rule ``update_norm_doubling``: the optimizer's step grows before loss and gradient do.

Seen in large runs: the norm of Adam's update doubles some steps before a loss spike, because gradients that point the same way raise
the first moment at once and the second one slowly, while the gradient norm is still what it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import UPDATES_MADE, Frame, Sample
from msprobe_engine.core.statistics.columns import Column
from msprobe_engine.probe.rules.alert_factory import number, scalar_alert
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.stateful_rule import LastingRule, layer_of
from msprobe_engine.probe.rules.tracked_series import Episode, Mask, RunningMedian, Slots, Watch

GLOBAL = "update_norm"


@dataclass(frozen=True, kw_only=True)
class UpdateNormArgs(LastingArgs):
    threshold: float = arg(2.0, "fires above so many times the running median", above=1.0)
    scatter: float = arg(6.0, "and so many times the usual deviation (of the logarithm) away", minimum=0.0)
    elements: int = arg(1024, "layers with fewer elements are not looked at", minimum=1)
    window: int = arg(50, "steps that the running median looks back", minimum=2)
    warmup: int = arg(20, "values before the median counts as known", minimum=1)


class _TwoLevels:
    """The level of x and that of x / learning rate; what counts is the smaller distance. Whether an update holds the learning rate or
    not, its schedule moves one of the two only."""

    def __init__(self, window: int, warmup: int) -> None:
        self.plain = RunningMedian(window, warmup)
        self._scaled = RunningMedian(window, warmup)

    def far(self, norms: Column, slots: Slots, healthy: Mask, rate: float | None, args: UpdateNormArgs) -> Mask:
        """Where both are too far away, [m]; the values that are not are taken in."""
        plain = self.plain.measure(norms, slots, healthy)
        measured = [(self.plain, plain)]
        if rate is not None and rate > 0.0:
            measured.append((self._scaled, self._scaled.measure(norms / rate, slots, healthy)))
        # A schedule is a trend and no scatter: what is usual is judged by the plain values.
        far = [distance.away > math.log(args.threshold) for _, distance in measured]
        out: Mask = np.logical_and.reduce([*far, plain.away > args.scatter * plain.scatter, self.plain.is_highest(plain, slots)])
        for level, distance in measured:
            level.add(distance, slots, healthy & ~out)
        return out

    def forget(self, slots: Slots) -> None:
        """Their levels begin anew."""
        self.plain.forget(slots)
        self._scaled.forget(slots)


class UpdateNormRule(LastingRule[UpdateNormArgs]):
    """Warnings when the norm of the update of a layer (family ``update``), or the global one (a number ``update_norm`` of the step, else
    over all layers), is `threshold` times its running median and the largest of the last half of the window, each by the root of the number
    of elements that the update moves: longer sequences move more of an embedding. The window begins anew where others than in the step
    before are updated (some are no longer frozen, or are left out of a step), and where the optimizer counts its updates anew or the
    learning rate falls to less than half (a warm-up)."""

    name = "update_norm_doubling"
    fires = (
        "the optimizer's update, of a layer or in total, doubles against its running median and is the largest of the last steps; the "
        "median begins anew where other parameters are updated or the learning rate warms up"
    )
    meaning = "The earliest known sign of a loss spike: gradients begin to point the same way while the second moment is still small."
    next = "keep a checkpoint of this step; lower beta2 or the learning rate, or clip updates, if the loss follows"
    all_kinds = ("update", "step")
    args_type = UpdateNormArgs

    def setup(self) -> None:
        self._watch = Watch(self.layouts, self._key)
        self._levels = _TwoLevels(self.args.window, self.args.warmup)
        self._elements: Column = np.zeros(0)
        self._made = self._rate = 0.0

    def _key(self, sample: Sample) -> str | None:
        if sample.family != "update" or self.left_out(sample.name):
            return None
        stage = f" (vpp stage {sample.vpp_stage})" if sample.vpp_stage else ""
        return f"{layer_of(sample.name)}{stage}"

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame; a skipped step has no update."""
        if not frame.complete or frame.skipped:
            return []
        view = self._watch.of(frame) if "update" in self.kinds or GLOBAL not in frame.scalars else None
        norm = moved = np.zeros(0)
        healthy = np.zeros(0, np.bool_)
        seen = np.zeros(0, np.intp)
        order = np.zeros(0, np.intp)
        total = frame.scalars.get(GLOBAL, math.nan)
        everything = 1.0
        if view is not None:
            table = view.table
            squares = view.total(table.squares)[view.seen]
            count = view.total(table.count)[view.seen]
            fine = view.total(~table.finite)[view.seen] == 0
            norm, seen, order = np.sqrt(squares), view.seen, table.layout.order
            moved = np.maximum(view.total(table.count - table.zeros)[view.seen], 1.0)
            everything = float(moved.sum())
            healthy = fine & (count >= self.args.elements) & (squares > 0.0) & (squares < np.inf)
            if math.isnan(total) and fine.all():
                total = math.sqrt(float(squares.sum()))
            if "update" not in self.kinds:
                healthy = np.zeros_like(healthy)
            self._levels.forget(self._find_others(frame, np.append(0, seen + 1), np.append(count.sum(), count)))
        if view is None and not math.isfinite(total):
            return []
        # The global norm has slot 0, the layers those behind it.
        known = "step" in self.kinds and math.isfinite(total) and total > 0.0
        norms = np.append(total if known else 1.0, norm)
        roots = np.sqrt(np.append(everything, moved))
        slots = np.append(0, seen + 1)
        judged = np.append(known, healthy)
        bad = self._levels.far(norms / roots, slots, judged, frame.scalars.get("learning_rate"), self.args)
        episodes = self.episodes.update(bad[judged], slots[judged])

        def name(slot: int) -> str:
            return GLOBAL if slot == 0 else self._watch.names[slot - 1]

        def describe(episode: Episode) -> Alert:
            i = int(np.searchsorted(slots, episode.slot))
            value, level = float(norms[i]), self._levels.plain.value(episode.slot) * float(roots[i])
            return scalar_alert(
                frame,
                name(episode.slot),
                "step" if episode.slot == 0 else "update",
                rule=self,
                value=value,
                expected=f"at most {number(self.args.threshold * level)}",
                seen=f"norm of the update {number(value)}, {number(value / level)} times its running median {number(level)}",
                order=None if episode.slot == 0 else int(order[self._watch.first[episode.slot - 1]]),
            )

        return self.build_alerts(frame, episodes, name, describe)

    def _find_others(self, frame: Frame, slots: Slots, elements: Column) -> Slots:
        """Those of `slots` where another number of elements is updated than the last time; all, where training begins anew."""
        self._elements = np.append(self._elements, np.zeros(max(int(slots[-1]) + 1 - len(self._elements), 0)))
        made, rate = self._made, self._rate
        self._made, self._rate = (frame.scalars.get(name, 0.0) for name in (UPDATES_MADE, "learning_rate"))
        others: Mask = (self._elements[slots] != elements) | (self._made < made) | (self._rate < 0.5 * rate)
        self._elements[slots] = elements
        return slots[others]
