"""Rules ``vanishing_gradient`` and ``exploding_gradient``: the reduced gradient of whole layers, against their own past; of the parts of a
layer (its attention, its feed-forward network) where it rises and stays up.

Layers and parts, not single tensors: a bias with eight elements, or the weights of queries and keys, may do anything in a healthy run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.statistics.columns import Column
from msprobe_engine.probe.rules.alert_factory import number, scalar_alert
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.base import ORDER
from msprobe_engine.probe.rules.fallen_loss import Fall
from msprobe_engine.probe.rules.stateful_rule import LastingRule, layer_of, part_of
from msprobe_engine.probe.rules.tracked_series import OCTAVE, Episode, Episodes, Level, Mask, Slots, View, Watch

_PART_ROW = 2
"""So many steps in a row the gradient of a part of a layer is high. In one step, of one hard batch, it rose by 0.9 of what fires (of the
logarithm) in a healthy run; in two by less than half, over all healthy runs of the set of reported bugs."""
_ELEMENTS = 1024
"""Smaller parts scatter too much: norms, gates."""
PHASES = ("", "reduced", "unscaled")
"""Phases of a reduced gradient that are compared over time; clipping hides a large gradient and shrinks all others."""


@dataclass(frozen=True, kw_only=True)
class LayerGradientArgs(LastingArgs):
    window: int = arg(200, "steps that the running level looks back", minimum=2)
    warmup: int = arg(20, "values before the level counts as known", minimum=1)


GLOBAL = "grad_norm"
L = TypeVar("L", bound=LayerGradientArgs)
Words = Callable[[float, float], tuple[str, str]]
"""From a gradient and the running level of its layer to what was expected, and what the gradient is held against."""


@dataclass
class Units:
    """What gradients are put together by. Each of them has a slot, and a running level.

    Attributes:
        peaks: by slot three logarithms: of the two highest peaks before, the lower first, and of the one that lasts now. A peak comes
            at least halfway (of the logarithm) to the threshold.
    """

    watch: Watch
    level: Level
    episodes: Episodes
    peaks: Column = field(default_factory=lambda: np.zeros((0, 3)))


class LayerGradientRule(LastingRule[L]):
    """A rule of the reduced gradients of whole layers."""

    def setup(self) -> None:
        self._layers = Units(Watch(self.layouts, self._layer), Level(self.args.window, self.args.warmup), self.episodes)

    def _layer(self, sample: Sample) -> str | None:
        """Key of the layer of a reduced gradient, None for other samples."""
        return self._key(sample, layer_of)

    def _key(self, sample: Sample, unit: Callable[[str], str | None]) -> str | None:
        if sample.family != "grad_reduced" or sample.phase not in PHASES or self.left_out(sample.name):
            return None
        name = unit(sample.name)
        stage = f" (vpp stage {sample.vpp_stage})" if sample.vpp_stage else ""
        return name and f"{name}{stage}{' unscaled' if sample.phase == 'unscaled' else ''}"

    @staticmethod
    def _rms(frame: Frame, view: View) -> tuple[Column, Mask, Column]:
        """Of every layer in the frame: root mean square without the loss scale, whether it is finite and not zero, and the sum of squares.
        [seen] each."""
        table = view.table
        squares = view.total(table.squares)[view.seen]
        count = view.total(table.count)[view.seen]
        fine = view.total(~table.finite)[view.seen] == 0
        scale = frame.scalars.get("loss_scale", 1.0)  # gradients before unscaling are that much larger, and it changes over the run
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            rms = np.sqrt(squares / count) / (scale if 0.0 < scale < math.inf else 1.0)
        return rms, fine & (squares > 0.0) & (squares < np.inf), squares

    def _say(self, frame: Frame, units: Units, view: View, rms: Column, bad: Mask, words: Words) -> list[Alert]:
        """Alerts for layers, or their parts, whose gradient is bad now, or is so no longer."""
        watch = units.watch

        def describe(episode: Episode) -> Alert:
            value = float(rms[np.searchsorted(view.seen, episode.slot)])
            expected, beside = words(value, units.level.value(episode.slot))
            seen, order = f"gradient with rms {number(value)}, {beside}", int(view.table.layout.order[watch.first[episode.slot]])
            name = watch.names[episode.slot]
            return scalar_alert(frame, name, "grad", rule=self, value=value, expected=expected, seen=seen, order=order)

        return self.build_alerts(frame, units.episodes.update(bad, view.seen), watch.names.__getitem__, describe)


@dataclass(frozen=True, kw_only=True)
class VanishingGradientArgs(LayerGradientArgs):
    drop: float = arg(1e-3, "fires below this part of the layer's own running level", above=0.0)
    share: float = arg(1e-6, "fires below this part of the median layer, too", above=0.0)
    patience: int = arg(10, "monitored steps in a row before the rule fires", minimum=1)


class VanishingGradientRule(LayerGradientRule[VanishingGradientArgs]):
    """Warnings for layers whose gradient (root mean square) has fallen below `drop` times its own level, and so much further than the loss
    has (a task that is learned has none left), or is below `share` times that of the median layer. A gradient of exact zeros is no
    vanishing one: nothing was computed for it."""

    name = "vanishing_gradient"
    fires = "the gradient of a layer falls to almost nothing, against its own past or against the other layers"
    meaning = "The layer does not learn any more: saturated activations, a cut in the graph, or values too small for the number format."
    next = (
        "watch its activations (`monitor: {activations: true, targets: [...]}`) for zeros and saturation; "
        "compare with a float32 run of a few steps"
    )
    all_kinds = ("grad",)
    args_type = VanishingGradientArgs

    def setup(self) -> None:
        super().setup()
        self._loss = Fall(self.args.window, self.args.warmup)

    def check(self, frame: Frame) -> list[Alert]:
        level = self._layers.level
        view = self._layers.watch.of(frame) if frame.complete else None
        fall = self._loss.of(frame) if frame.complete else 0.0
        if view is None:
            return []
        rms, healthy, _ = self._rms(frame, view)
        distance = level.measure(rms, view.seen, healthy)
        others = float(np.median(rms[healthy])) if int(healthy.sum()) >= 3 else 0.0
        low = distance.away < math.log(self.args.drop) + fall
        bad = low | (healthy & (rms < self.args.share * others))
        level.add(distance, view.seen, healthy & ~low)

        def words(value: float, usual: float) -> tuple[str, str]:
            least = self.args.drop * math.exp(fall) * usual
            against = value < least
            expected = f"at least {number(least if against else self.args.share * others)}"
            return expected, f"its running level is {number(usual)}" if against else f"the median layer has {number(others)}"

        return self._say(frame, self._layers, view, rms, bad, words)


@dataclass(frozen=True, kw_only=True)
class ExplodingGradientArgs(LayerGradientArgs):
    threshold: float = arg(20.0, "fires above so many times the running level", above=1.0)
    scatter: float = arg(8.0, "and so many times the usual deviation (of the logarithm) away", minimum=0.0)
    share: float = arg(0.01, "only layers with at least this part of the global norm", minimum=0.0)
    window: int = arg(100, "steps that the running level looks back", minimum=2)


class ExplodingGradientRule(LayerGradientRule[ExplodingGradientArgs]):
    """Warnings for layers whose gradient, or a ``grad_norm`` of the step that, is `threshold` times its running level, and more than
    twice what it has risen to twice before: tasks that take turns have gradients of different sizes. For parts of a layer where two
    steps in a row are: in one hard batch they rise more than the whole layer."""

    name = "exploding_gradient"
    fires = (
        "the gradient of a layer, of a part of it for two steps, or the global norm, rises far above its own running level, and above what "
        "it has risen to twice before"
    )
    meaning = "An unstable layer or a learning rate that is too high; without clipping the next update will be as large."
    next = f"{ORDER}; the layer named first is where it began. Try gradient clipping or a smaller learning rate"
    all_kinds = ("grad", "step")
    args_type = ExplodingGradientArgs

    def setup(self) -> None:
        super().setup()
        self._owners: dict[str, str | None] = {}
        level, episodes = Level(self.args.window, self.args.warmup), Episodes(max(self.args.patience, _PART_ROW), self.args.recovery)
        self._parts = Units(Watch(self.layouts, self._part), level, episodes)
        self._norm = Level(self.args.window, self.args.warmup)
        self._norm_peaks = np.full((1, 3), -np.inf)
        self._norm_episodes = Episodes(self.args.patience, self.args.recovery)

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame; a skipped step has no gradient worth a comparison."""
        if not frame.complete or frame.skipped:
            return []
        alerts = self._check_layers(frame) if "grad" in self.kinds else []
        value = frame.scalars.get(GLOBAL, math.nan)
        if "step" in self.kinds and not self.left_out(GLOBAL) and 0.0 < value < math.inf:
            alerts += self._check_norm(frame, value)
        return alerts

    def _part(self, sample: Sample) -> str | None:
        """Key of the part of a layer."""
        key = self._key(sample, part_of)
        if key is not None:
            self._owners[key] = self._layer(sample)
        return key

    def _check_layers(self, frame: Frame) -> list[Alert]:
        """Layers, then parts of those that are not high themselves."""
        alerts: list[Alert] = []
        told: set[str | None] = set()
        total = 0.0
        for units in (self._layers, self._parts):
            view = units.watch.of(frame)
            if view is None:
                break
            rms, healthy, squares = self._rms(frame, view)
            units.peaks = np.concatenate([units.peaks, np.full((view.size - len(units.peaks), 3), -np.inf)])
            high = self._find_high(units.level, units.peaks, rms, view.seen, healthy)
            total = total or float(squares[healthy].sum())
            high &= squares >= self.args.share**2 * total
            if units is self._parts:
                high &= view.total(view.table.count)[view.seen] >= _ELEMENTS
            for i in np.flatnonzero(high).tolist():
                name = units.watch.names[view.seen[i]]
                high[i] = self._owners.get(name) not in told
                if units is self._layers:
                    told.add(name)
            alerts += self._say(frame, units, view, rms, high, self._words)
        return alerts

    def _check_norm(self, frame: Frame, value: float) -> list[Alert]:
        slot = np.zeros(1, np.intp)
        high = self._find_high(self._norm, self._norm_peaks, np.array([value]), slot, np.ones(1, np.bool_))

        def words() -> tuple[str, str]:
            expected, beside = self._words(value, self._norm.value(0))
            return expected, f"value {number(value)}, {beside}"

        return self.say_number(frame, GLOBAL, bool(high[0]), value, words, kind="step", episodes=self._norm_episodes)

    def _find_high(self, level: Level, peaks: Column, x: Column, slots: Slots, healthy: Mask) -> Mask:
        """Where a value is too high, [m]; the others are taken in. `peaks` as in `Units`."""
        distance = level.measure(x, slots, healthy)
        limit, log = math.log(self.args.threshold), np.log(np.where(healthy, x, 1.0))
        before, lasting = peaks[slots, :2], peaks[slots, 2]
        high: Mask = (distance.away > limit) & (distance.away > self.args.scatter * distance.scatter) & (log > before[:, 0] + OCTAVE)
        level.add(distance, slots, healthy & ~high)
        is_peak = distance.away > 0.5 * limit
        ended = np.where(healthy & ~is_peak, lasting, -np.inf)
        peaks[slots, :2] = np.sort(np.column_stack([before, ended]), 1)[:, 1:]
        peaks[slots, 2] = np.where(is_peak, np.maximum(lasting, log), np.where(healthy, -np.inf, lasting))
        return high

    def _words(self, value: float, level: float) -> tuple[str, str]:
        return f"at most {number(self.args.threshold * level)}", f"{number(value / level)} times its running level {number(level)}"
