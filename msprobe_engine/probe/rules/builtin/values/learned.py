"""Rule ``learned``: holds a run against the bands and relations of a healthy one, see `msprobe_engine.probe.rules.bands`."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import ProbeError, SettingsError
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.statistics.columns import Column
from msprobe_engine.probe.rules.alert_factory import alert_at, is_excluded, number, over_alert, scalar_alert
from msprobe_engine.probe.rules.arguments import CommonArgs, arg
from msprobe_engine.probe.rules.bands import Band, Bands, key_of, load_bands
from msprobe_engine.probe.rules.base import ORDER, Rule
from msprobe_engine.probe.rules.builtin.parameters.unchanged_parameter import UnchangedParameterArgs, UnchangedParameterRule
from msprobe_engine.probe.rules.builtin.values.nan_inf import NanInfArgs, NanInfRule
from msprobe_engine.probe.rules.layout import LayoutCache, Table
from msprobe_engine.probe.rules.stateful_rule import episode_alerts
from msprobe_engine.probe.rules.tensor_kinds import KINDS, scalar_kind
from msprobe_engine.probe.rules.tracked_series import Episode, Episodes, Mask, Slots, View, Watch


@dataclass(frozen=True, kw_only=True)
class LearnedArgs(CommonArgs):
    file: str = arg("", "bands.json, made by msprobe monitor learn")
    patience: int = arg(0, "steps in a row outside of its band before a metric counts; 0: what the file says", minimum=0)
    recovery: int = arg(10, "steps inside after which it counts as ended, which is said, too", minimum=1)
    widen: float = arg(1.0, "bands are this much wider than learned", above=0.0)


class Limits:
    """Bands as columns: low and high of n metrics at any step."""

    def __init__(self, bands: Sequence[Band], knots: Sequence[int], widen: float) -> None:
        low = np.array([band.low for band in bands], np.float64).reshape(len(bands), len(knots))
        high = np.array([band.high for band in bands], np.float64).reshape(len(bands), len(knots))
        middle, half = (low + high) / 2.0, (high - low) / 2.0 * widen
        self.log: Mask = np.array([band.log for band in bands], np.bool_)
        self._low, self._high = middle - half, middle + half
        self._knots = np.array(knots, np.float64)
        self._step: int | None = None
        self._at: tuple[Column, Column] = (np.zeros(0), np.zeros(0))

    def at(self, step: int) -> tuple[Column, Column]:
        """Low and high of every metric at a step, [n] each."""
        if step != self._step:
            place = float(np.interp(step, self._knots, np.arange(len(self._knots))))
            i = min(int(place), len(self._knots) - 1)
            j, w = min(i + 1, len(self._knots) - 1), place - int(place)
            self._step = step
            self._at = (
                self._low[:, i] * (1.0 - w) + self._low[:, j] * w,
                self._high[:, i] * (1.0 - w) + self._high[:, j] * w,
            )
        return self._at

    def over(self, steps: npt.NDArray[np.int64]) -> tuple[Column, Column]:
        """Low and high of the first metric at many steps, [steps] each."""
        return np.interp(steps, self._knots, self._low[0]), np.interp(steps, self._knots, self._high[0])

    def outside(self, values: Column, step: int) -> Mask:
        """Which values are out of their band, [n]. A zero is below every band of logarithms, a value that is not finite is none's
        business here."""
        low, high = self.at(step)
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.where(self.log, np.log(np.abs(values)), values)
        out: Mask = ((x < low) | (x > high)) & np.isfinite(values)
        return out

    def words(self, i: int, step: int) -> str:
        """The band of one metric at a step, for a message."""
        low, high = (float(side[i]) for side in self.at(step))
        if self.log[i]:
            low, high = math.exp(min(low, 700.0)), math.exp(min(high, 700.0))
        return f"{number(low)} to {number(high)}"


class _Family:
    """The metrics of one statistic: its samples have slot i of `limits`."""

    def __init__(self, op: str, names: Sequence[str], watch: Watch, limits: Limits, episodes: Episodes) -> None:
        self.op, self.names, self.watch, self.limits, self.episodes = op, names, watch, limits, episodes
        self._slots = {name: i for i, name in enumerate(names)}
        self._known: Slots = np.zeros(0, np.intp)
        self._generation = -1

    def slots(self, view: View) -> Slots:
        """Slots of the tensors of a view, [m]: those of the watch are given out as names come."""
        if self._generation != self.watch.generation or len(self._known) != len(self.watch.names):
            self._generation = self.watch.generation
            self._known = np.array([self._slots[name] for name in self.watch.names], np.intp)
        return self._known[view.slots]


class LearnedRule(Rule):
    """Warnings for metrics outside of their band, and for relations that do not hold any more. Metrics that were not learned are not
    looked at.

    Raises:
        SettingsError: the file is missing or wrong.
    """

    name = "learned"
    fires = "a metric leaves the band that `msprobe monitor learn` found in a healthy run, or a relation that held there does not"
    meaning = "This run does something that the healthy run never did."
    next = f"{ORDER}; if the change is meant, learn again from a run that has it"
    recommended = False
    args_type = LearnedArgs
    args: LearnedArgs

    def __init__(
        self,
        args: LearnedArgs | None = None,
        *,
        severity: str = "",
        kinds: Sequence[str] = (),
        layouts: LayoutCache | None = None,
        bands: Bands | None = None,
    ) -> None:
        self._bands = bands
        super().__init__(args, severity=severity, kinds=kinds, layouts=layouts)

    def setup(self) -> None:
        args, bands = self.args, self._bands
        if bands is None:
            if not args.file:
                raise SettingsError("rules: learned.file is missing; msprobe monitor learn RUN -o bands.json makes it")
            try:
                bands = load_bands(Path(args.file))
            except ProbeError as error:
                raise SettingsError(f"rules: learned.file: {error}") from error
        patience = args.patience or bands.patience
        names = [n for n in bands.scalars if scalar_kind(n) in self.kinds and not is_excluded(n, args.exclude)]
        self._scalars = {name: i for i, name in enumerate(names)}
        self._scalar_limits = Limits([bands.scalars[n] for n in names], bands.knots, args.widen)
        self._scalar_episodes = Episodes(patience, args.recovery)
        self._families: list[_Family] = []
        for family, ops in bands.samples.items():
            for op, keys in ops.items():
                limits = Limits(list(keys.values()), bands.knots, args.widen)
                watch = Watch(self.layouts, _chooser(family, keys, args.exclude))
                self._families.append(_Family(op, list(keys), watch, limits, Episodes(patience, args.recovery)))
        self._relations = _Relations(bands, self)

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame; a step that was cut off, or skipped, is not held against bands."""
        if not frame.complete:
            return []
        alerts = self._relations.check(frame)
        if frame.skipped:
            return alerts
        for family in self._families:
            view = family.watch.of(frame)
            if view is not None:
                alerts += self._samples(frame, family, view)
        return alerts + self._numbers(frame)

    def _samples(self, frame: Frame, family: _Family, view: View) -> list[Alert]:
        size = len(family.names)
        values, is_finite = np.full(size, np.nan), np.zeros(size, np.bool_)
        slots = family.slots(view)
        values[slots] = statistic(view.table, family.op)[view.places]
        is_finite[slots] = np.isfinite(values[slots])
        judged = np.flatnonzero(is_finite)
        bad = family.limits.outside(values, frame.step)[judged]
        episodes = family.episodes.update(bad, judged)
        if not episodes:
            return []
        places = dict(zip(slots.tolist(), view.places.tolist()))

        def kind(slot: int) -> str:
            return KINDS[view.table.layout.kinds[places[slot]]]

        def describe(episode: Episode) -> Alert:
            value = float(values[episode.slot])
            return alert_at(
                frame,
                view.table.layout,
                places[episode.slot],
                rule=self,
                value=value,
                expected=f"{family.limits.words(episode.slot, frame.step)} as in the healthy run",
                seen=f"{'share of zeros' if family.op == 'zeros' else family.op} {number(value)} for {episode.steps} steps",
                extra={"op": family.op},
            )

        return episode_alerts(
            frame,
            [e for e in episodes if e.over or kind(e.slot) in self.kinds],
            lambda slot: family.names[slot].split(" ", 4)[4],
            describe,
            rule=self.name,
            kind=kind(episodes[0].slot),
            max_alerts=self.args.max_alerts,
        )

    def _numbers(self, frame: Frame) -> list[Alert]:
        values = np.full(len(self._scalars), np.nan)
        for name, i in self._scalars.items():
            values[i] = frame.scalars.get(name, math.nan)
        judged = np.flatnonzero(np.isfinite(values))
        bad = self._scalar_limits.outside(values, frame.step)[judged]
        names = list(self._scalars)
        alerts: list[Alert] = []
        for episode in self._scalar_episodes.update(bad, judged):
            name, value = names[episode.slot], float(values[episode.slot])
            if episode.over:
                alerts.append(over_alert(frame, name, scalar_kind(name), rule=self.name, steps=episode.steps))
                continue
            alerts.append(
                scalar_alert(
                    frame,
                    name,
                    scalar_kind(name),
                    rule=self,
                    value=value,
                    expected=f"{self._scalar_limits.words(episode.slot, frame.step)} as in the healthy run",
                    seen=f"value {number(value)} for {episode.steps} steps",
                )
            )
        return alerts


class _Changing(UnchangedParameterRule):
    """Parameters that changed with every step of the healthy run."""

    only: frozenset[str] = frozenset()

    def _key(self, sample: Sample) -> str | None:
        key = super()._key(sample)
        return key if key in self.only else None


class _Relations:
    """What held in every step of the healthy run."""

    def __init__(self, bands: Bands, rule: LearnedRule) -> None:
        self._rule = rule
        args, kinds, severity, layouts = rule.args, rule.kinds, rule.severity, rule.layouts
        self._scale = bands.scale and "step" in kinds
        self._last = math.nan
        self._skipped = False
        self._changing: _Changing | None = None
        if bands.changing and "param" in kinds:
            given = UnchangedParameterArgs(exclude=args.exclude, max_alerts=args.max_alerts, recovery=args.recovery, frozen=True)
            self._changing = _Changing(given, severity=severity, layouts=layouts)
            self._changing.only = frozenset(bands.changing)
            self._changing.speak_as(rule)
        self._finite: NanInfRule | None = None
        if bands.finite and "grad" in kinds:
            self._finite = NanInfRule(
                NanInfArgs(exclude=args.exclude, max_alerts=args.max_alerts), severity=severity, kinds=("grad",), layouts=layouts
            )
            self._finite.speak_as(rule)

    def check(self, frame: Frame) -> list[Alert]:
        alerts: list[Alert] = []
        for rule in (self._changing, self._finite):
            if rule is not None:
                alerts += rule.check(frame)
        scale = frame.scalars.get("loss_scale")
        skipped = frame.skipped
        if self._scale and scale is not None:
            if scale < self._last and not skipped and not self._skipped:
                alerts.append(
                    scalar_alert(
                        frame,
                        "loss_scale",
                        "step",
                        rule=self._rule,
                        value=scale,
                        expected="a loss scale that falls only when an update is skipped, as in the healthy run",
                        seen=f"value {number(scale)}, down from {number(self._last)} without a skipped update",
                    )
                )
            self._last = scale
        self._skipped = skipped
        return alerts


def statistic(table: Table, op: str) -> npt.NDArray[np.float64]:
    """The statistic of every tensor of a table, [n], NaN where it is not finite."""
    if op == "norm":
        return np.where(table.finite, np.sqrt(table.squares), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(table.zeros / table.count)


def _chooser(family: str, keys: Container[str], exclude: Sequence[str]) -> Callable[[Sample], str | None]:
    def key(sample: Sample) -> str | None:
        if sample.family != family or is_excluded(sample.name, exclude):
            return None
        told = key_of(sample)
        return told if told in keys else None

    return key
