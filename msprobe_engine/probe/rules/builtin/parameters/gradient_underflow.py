"""Rule ``gradient_underflow``: gradients that the number format turns into zeros."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.statistics.columns import Column
from msprobe_engine.core.statistics.rows import BELOW, FLAGS, HAS_BELOW, HAS_EPS
from msprobe_engine.probe.rules.alert_factory import alert_at, number
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.stateful_rule import LastingRule
from msprobe_engine.probe.rules.tracked_series import Episode, Mask, View, Watch

_SMALLER = 0.5
"""Part of their usual size that the elements other than zero have at most, where others have become too small for the format."""
_FAMILIES = ("grad_unreduced", "grad_reduced", "actv_grad")


@dataclass(frozen=True, kw_only=True)
class GradientUnderflowArgs(LastingArgs):
    threshold: float = arg(0.1, "share of the elements other than zero that would become zero in monitor.underflow_dtype", above=0.0)
    rise: float = arg(0.3, "how far the share of exact zeros may rise above its running mean", above=0.0)
    elements: int = arg(64, "gradients with fewer elements are not looked at", minimum=1)
    warmup: int = arg(20, "values before the running mean counts as known", minimum=1)
    patience: int = arg(10, "monitored steps in a row before the rule fires", minimum=1)


class GradientUnderflowRule(LastingRule[GradientUnderflowArgs]):
    """Warnings for gradients that lose elements at the lower end of a number format.

    With op ``underflow`` among ``monitor.ops`` the share of lost elements is known. Without it, what underflowed already shows as
    exact zeros: their share is held against its own running mean, because embeddings, experts and ReLUs have many in any case. What is
    left has become smaller, too: else it is a mask that makes the zeros. A gradient of zeros alone was not
    computed, unless most are.
    """

    name = "gradient_underflow"
    fires = "a good part of a gradient is, or becomes, zero for want of range in the number format, while the rest becomes smaller"
    meaning = "Gradients are smaller than the format can hold: the loss scale is too small, or a scale in the model is."
    next = "raise the loss scale or use bfloat16; watch op `underflow` with `monitor.underflow_dtype` of the training"
    all_kinds = ("grad", "activation_grad")
    args_type = GradientUnderflowArgs

    def setup(self) -> None:
        self._watch = Watch(self.layouts, self._key)
        self._mean: Column = np.zeros(0)
        self._rms: Column = np.zeros(0)
        self._seen = np.zeros(0, np.int64)

    def _key(self, sample: Sample) -> str | None:
        if sample.family not in _FAMILIES or self.left_out(sample.name):
            return None
        if ("activation_grad" if sample.family == "actv_grad" else "grad") not in self.kinds:
            return None
        return f"{sample.family} {sample.vpp_stage} {sample.micro_step} {sample.phase} {sample.name}"

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame; a skipped step is not looked at."""
        view = self._watch.of(frame) if frame.complete and not frame.skipped else None
        if view is None:
            return []
        table, seen = view.table, view.seen
        zeros, count = view.spread(table.zeros)[seen], view.spread(table.count)[seen]
        large = count >= self.args.elements
        with np.errstate(invalid="ignore", divide="ignore"):
            share = zeros / count
            lost = self._count_lost(view)[seen] / (count - zeros)
        rising = self._find_rising(share, view, large)
        bad = large & ((lost > self.args.threshold) | rising)
        episodes = self.episodes.update(bad, seen)

        def describe(episode: Episode) -> Alert:
            i = int(np.searchsorted(seen, episode.slot))
            if rising[i]:
                usual = float(self._mean[episode.slot])
                value, limit = float(share[i]), usual + self.args.rise
                what = f"exact zeros, usual are {number(100.0 * usual)} %"
            else:
                value, limit, what = float(lost[i]), self.args.threshold, "of the elements other than zero would become zero"
            return alert_at(
                frame,
                table.layout,
                self._watch.first[episode.slot],
                rule=self,
                value=value,
                expected=f"at most {number(100.0 * limit)} %",
                seen=f"{number(100.0 * value)} % {what}, for {episode.steps} monitored steps",
            )

        return self.build_alerts(frame, episodes, lambda slot: self._watch.names[slot].split(" ", 4)[4], describe)

    def _count_lost(self, view: View) -> Column:
        """Elements below the limit that are not zero, by slot; 0 where it was not counted."""
        ints = view.table.ints
        counted = (ints[:, FLAGS] & (HAS_BELOW | HAS_EPS)) == HAS_BELOW
        return view.spread(np.where(counted, ints[:, BELOW] - view.table.zeros, 0).astype(np.float64))

    def _find_rising(self, share: Column, view: View, large: Mask) -> Mask:
        if view.size > len(self._seen):
            more = max(view.size, 2 * len(self._seen)) - len(self._seen)
            self._mean, self._rms = np.append(self._mean, np.zeros(more)), np.append(self._rms, np.zeros(more))
            self._seen = np.append(self._seen, np.zeros(more, np.int64))
        mean, usual, seen = self._mean[view.seen], self._rms[view.seen], self._seen[view.seen]
        some = large & ((share < 1.0) | (np.median(share) == 1.0))
        left = view.spread(view.table.count - view.table.zeros)[view.seen]
        rms = np.sqrt(view.spread(view.table.squares)[view.seen] / np.maximum(left, 1.0))
        rising: Mask = some & (seen >= self.args.warmup) & (share > mean + self.args.rise) & (rms < _SMALLER * usual)
        weight = np.where(some & ~rising & np.isfinite(rms), np.maximum(1.0 / (seen + 1.0), 0.02), 0.0)
        self._mean[view.seen] = mean + weight * np.where(some, share - mean, 0.0)
        self._rms[view.seen] = usual + np.where(weight > 0.0, weight * (rms - usual), 0.0)
        self._seen[view.seen] = seen + some
        return rising
