"""Rule ``condition``: an expression of the settings that should not hold."""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.statistics.columns import column
from msprobe_engine.core.statistics.rows import NANS, NEG_INF, POS_INF, SUM
from msprobe_engine.probe.rules.alert_factory import number, over_alert
from msprobe_engine.probe.rules.arguments import arg
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.expression import Expression, MissingValue
from msprobe_engine.probe.rules.layout import LayoutCache
from msprobe_engine.probe.rules.tensor_kinds import scalar_kind
from msprobe_engine.probe.rules.tracked_series import Episodes, View, Watch

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SLOT = np.zeros(1, np.intp)
_log = get_logger()
_LOOKS = 10
"""Monitored steps after which a number of the expression that none of them had is likely to be misspelt or not watched."""


@dataclass(frozen=True, kw_only=True)
class ConditionArgs:
    name: str = arg("", "what its alerts are called: small letters, digits and _")
    when: str = arg("", "the expression; it holds when something is wrong")
    window: int = arg(50, "past values that median, mean, min, max and ratio look at", minimum=1)
    warmup: int = arg(10, "past values that have to be there before these functions say anything", minimum=1)
    for_steps: int = arg(1, "steps in a row that it has to hold before the rule fires", minimum=1)
    recovery: int = arg(10, "steps without it after which it counts as ended, which is said, too", minimum=1)
    message: str = arg("", "the line of the alert; empty: the expression")
    meaning: str = arg("", "what it usually means")
    next: str = arg("", "what to run next")


class ConditionRule(Rule):
    """Alerts while the expression holds: one when it has held for `for_steps` steps, one when it is over. A step that lacks a number of
    the expression says nothing.

    Raises:
        SettingsError: no name, no expression, or one that is not allowed.
    """

    name = "condition"
    fires = "the expression `when` holds for `for_steps` steps"
    meaning = "A condition of the settings holds."
    next = "see the condition in the settings"
    recommended = False
    args_type = ConditionArgs
    args: ConditionArgs

    def setup(self) -> None:
        args = self.args
        if self.kinds is not self.all_kinds:
            raise SettingsError("rules: condition.kinds: the expression says what is looked at; leave kinds out")
        if not _NAME.fullmatch(args.name):
            raise SettingsError(f"rules: condition.name = {args.name!r}: expected small letters, digits and _, a letter first, at most 64")
        self.name, self.meaning, self.next = args.name, args.meaning or self.meaning, args.next or self.next
        self._expression = Expression(args.when, window=args.window, warmup=args.warmup, where=f"rules: condition '{args.name}', when")
        self._unseen, self._looks = set(self._expression.numbers), _LOOKS
        self._source = _FrameSource(self.layouts)
        self._episodes = Episodes(args.for_steps, args.recovery)

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame; a step that was cut off is not looked at."""
        if not frame.complete:
            return []
        self._source.frame = frame
        judged = self._expression.judge(self._source)
        if self._unseen and self._looks:
            self._miss(frame)
        if judged is None:
            return []
        holds, seen = judged
        alerts: list[Alert] = []
        for episode in self._episodes.update(np.array([holds]), _SLOT):
            if episode.over:
                alerts.append(over_alert(frame, self.name, "step", rule=self.name, steps=episode.steps))
            else:
                alerts.append(self._alert(frame, seen, episode.steps))
        return alerts

    def _miss(self, frame: Frame) -> None:
        """Say once what the expression asks for and no step has; steps that are not monitored do not count."""
        self._unseen = self._expression.find_missing(self._source, self._unseen)
        self._looks -= bool(frame.samples)
        if self._unseen and not self._looks:
            families = ", ".join(dict.fromkeys(sample.family for sample in frame.samples))
            _log.warning(
                f"rules: condition '{self.name}': no step has had {', '.join(sorted(self._unseen))} so far: misspelt, or not watched? "
                f"Numbers of the step: {', '.join(sorted(frame.scalars)) or 'none'}; families: {families}"
            )

    def _alert(self, frame: Frame, seen: dict[str, float], steps: int) -> Alert:
        first = next(iter(seen), "")
        values = ", ".join(f"{text} = {number(value)}" for text, value in seen.items())
        kind = "loss" if first and scalar_kind(first) == "loss" else "step"
        lasting = f" for {steps} steps" if steps > 1 else ""
        return Alert(
            rule=self.name,
            severity=self.severity,
            kind=kind,
            name=self.name,
            step=frame.step,
            rank=frame.rank,
            value=seen.get(first, math.nan),
            expected=f"not: {self._expression.text}",
            message=f"{self.name}: {self.args.message or self._expression.text}, rank {frame.rank} step {frame.step}{lasting}: {values}",
            order=len(frame.entries) + len(frame.samples),
            extra={
                **self.words,
                "when": self._expression.text,
                "values": {text: value for text, value in seen.items() if math.isfinite(value)},
            },
        )


class _FrameSource:
    """The numbers of one frame, for an expression."""

    def __init__(self, layouts: LayoutCache) -> None:
        self.frame: Frame = Frame(0, 0, np.zeros((0, 16)))
        self._layouts = layouts
        self._watches: dict[tuple[str, str, str], Watch] = {}

    def scalar(self, name: str) -> float:
        """A number of the step."""
        value = self.frame.scalars.get(name)
        if value is None:
            raise MissingValue(name)
        return float(value)

    def select(self, op: str, family: str, pattern: str, phase: str) -> float:
        """A statistic over all elements of the samples of `family` that match."""
        watch = self._watches.get((family, pattern, phase))
        if watch is None:

            def key(sample: Sample) -> str | None:
                fits = sample.family == family and (not phase or sample.phase == phase)
                return pattern if fits and fnmatch.fnmatchcase(sample.name, pattern) else None

            watch = self._watches[family, pattern, phase] = Watch(self._layouts, key)
        view = watch.of(self.frame)
        if view is None:
            raise MissingValue(f"{family} {pattern}")
        return _statistic(op, view)


def _statistic(op: str, view: View) -> float:
    """One statistic over the union of the samples of a view, with NaN and Inf as one tensor of all elements would have it."""
    table, places = view.table, view.places
    rows = table.rows[places]
    count = float(table.count[places].sum())
    if op in ("nans", "infs"):
        words = (NANS,) if op == "nans" else (POS_INF, NEG_INF)
        return float(sum(int(table.ints[places, word].sum()) for word in words))
    if op == "zeros":
        return float(table.zeros[places].sum()) / count if count else math.nan
    if op in ("min", "max"):
        values = column(rows, op)
        known = values[table.count[places] > 0]
        return math.nan if not len(known) else float(known.min() if op == "min" else known.max())
    if op == "absmax":
        ends = np.abs(np.concatenate([column(rows, "min"), column(rows, "max")]))[np.tile(table.count[places] > 0, 2)]
        return float(ends.max()) if len(ends) else math.nan
    if op == "mean":
        means = column(rows, "mean")[table.count[places] > 0]
        return float(rows[:, SUM].sum()) / count if np.isfinite(means).all() and count else float(means.sum()) if len(means) else math.nan
    norms = column(rows, "norm")[table.count[places] > 0]
    norm = float(np.sqrt((norms * norms).sum())) if len(norms) else math.nan
    return norm if op == "norm" else norm / math.sqrt(count) if count else math.nan
