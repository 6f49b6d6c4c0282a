"""Rule ``outlier_rank``: numbers of one rank that differ from those of all others.

The numbers of the ranks are exchanged outside of any frame, some steps late; who does that hands them to `OutlierRankRule.submit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.rules.alert_factory import number, scalar_alert
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.stateful_rule import LastingRule
from msprobe_engine.probe.rules.tensor_kinds import scalar_kind
from msprobe_engine.probe.rules.tracked_series import Episode, Mask, Slots

WAITING = 64
"""Steps that may wait for the next frame; older ones are dropped."""


class RankNumbers(NamedTuple):
    """Numbers of one step on several ranks.

    Attributes:
        ranks: global ranks, [r].
        names: what the numbers are, [k].
        values: [r, k] float64; NaN where a rank has no such number.
    """

    step: int
    ranks: Sequence[int]
    names: Sequence[str]
    values: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class OutlierRankArgs(LastingArgs):
    threshold: float = arg(8.0, "fires so many standard deviations (by the median deviation over ranks) from the median", above=0.0)
    distance: float = arg(0.5, "and so far from the median, as a part of it", above=0.0)
    scalars: tuple[str, ...] = arg(("loss", "grad_norm_local", "step_seconds"), "numbers of the step that are exchanged")
    patience: int = arg(5, "steps in a row before the rule fires", minimum=1)


class OutlierRankRule(LastingRule[OutlierRankArgs]):
    """Warnings for numbers of this rank that are far from the median over the ranks. Each rank judges its own, so that an alert comes
    from the rank it is about. Three ranks are the least with which it can be said who differs."""

    name = "outlier_rank"
    fires = "numbers of one rank (loss, local gradient norm, time) differ from those of all others for `patience` steps"
    meaning = "One rank computes something else: its data, its device, or a parameter that drifted."
    next = "switch on `monitor.replica_check`; dump a step there and on a neighbour and compare the records"
    all_kinds = ("step", "loss")
    args_type = OutlierRankArgs

    def setup(self) -> None:
        self._arrived: deque[RankNumbers] = deque(maxlen=WAITING)
        self._slots: dict[str, int] = {}

    def submit(self, numbers: RankNumbers) -> None:
        """Numbers of all ranks for one step; judged with the next frame. May be called from any thread."""
        self._arrived.append(numbers)

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for all numbers that have arrived."""
        alerts: list[Alert] = []
        while self._arrived:
            alerts += self._judge(frame, self._arrived.popleft())
        return alerts

    def _judge(self, frame: Frame, numbers: RankNumbers) -> list[Alert]:
        ranks = list(numbers.ranks)
        if frame.rank not in ranks:
            return []
        values = np.asarray(numbers.values, np.float64)
        names = [n for n in numbers.names if scalar_kind(n) in self.kinds and not self.left_out(n)]
        columns = [list(numbers.names).index(n) for n in names]
        own = values[ranks.index(frame.rank), columns]
        bad, median, judged = _outliers(values[:, columns], own, self.args)
        slots = np.array([self._slots.setdefault(n, len(self._slots)) for n in names], np.intp)
        known: Slots = np.flatnonzero(judged)
        episodes = self.episodes.update(bad[known], slots[known])
        by_slot = {slot: name for name, slot in self._slots.items()}

        def describe(episode: Episode) -> Alert:
            name = by_slot[episode.slot]
            i = names.index(name)
            return scalar_alert(
                frame,
                name,
                scalar_kind(name),
                rule=self,
                value=float(own[i]),
                expected="a value near that of the other ranks",
                seen=f"value {number(float(own[i]))} in step {numbers.step}, the median of {len(ranks)} ranks is "
                f"{number(float(median[i]))}, for {episode.steps} steps",
                extra={"ranks": ranks, "of_step": numbers.step},
            )

        return self.build_alerts(frame, episodes, by_slot.__getitem__, describe)


def _outliers(
    values: npt.NDArray[np.float64], own: npt.NDArray[np.float64], args: OutlierRankArgs
) -> tuple[Mask, npt.NDArray[np.float64], Mask]:
    """Which of this rank's numbers are outliers, the medians, and which could be judged. [k] each."""
    n = values.shape[1]
    bad, judged, medians = np.zeros(n, np.bool_), np.zeros(n, np.bool_), np.full(n, np.nan)
    for k in range(n):
        column = values[:, k]
        finite = column[np.isfinite(column)]
        if len(finite) < 3 or np.isnan(own[k]):  # no such number here
            continue
        medians[k] = median = float(np.median(finite))
        scatter = 1.4826 * float(np.median(np.abs(finite - median)))
        judged[k] = True
        bad[k] = not np.isfinite(own[k]) or abs(own[k] - median) > max(args.threshold * scatter, args.distance * abs(median))
    return bad, medians, judged


def outlier_rule(rules: Sequence[Rule]) -> OutlierRankRule | None:
    """The outlier rule among `rules`, None when the settings have none: then nothing need be exchanged."""
    return next((rule for rule in rules if isinstance(rule, OutlierRankRule)), None)
