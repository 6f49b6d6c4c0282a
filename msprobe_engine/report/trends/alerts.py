"""The alerts of a run as a page lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.monitor.alert_order import in_order
from msprobe_engine.formats.monitor.anomalies import from_alert
from msprobe_engine.report.web.sentences import both

MAX_ALERTS = 500


@dataclass(frozen=True)
class Raised:
    """What the rules of a run raised, by step.

    Attributes:
        listed: in the order of execution, the earliest first, those that say that a condition has gone among them.
        began: without these: they are listed, not counted.
    """

    listed: list[Mapping[str, Any]] = field(default_factory=list)
    began: list[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, alerts: Iterable[Mapping[str, Any]]) -> Raised:
        listed = _in_order(alerts)
        return cls(listed, [alert for alert in listed if not _is_over(alert)])

    def rows(self) -> list[dict[str, Any]]:
        """The first `MAX_ALERTS`, for a page."""
        keys = ("step", "rank", "rule", "severity", "kind", "name", "micro_step")
        return [
            {key: alert.get(key) for key in keys} | {"message": both(str(alert.get("message", ""))[:500])}
            for alert in self.listed[:MAX_ALERTS]
        ]

    def lanes(self, first: npt.NDArray[np.int64], shift: int = 0) -> list[dict[str, Any]]:
        """Per rule and severity how many began in each column, for a page; those without a step are in none.

        Args:
            first: step with which each column begins, ascending.
            shift: added to the steps of the alerts.
        """
        rows: dict[tuple[str, str], Counter[int]] = {}
        for alert in self.began:
            if isinstance(step := alert.get("step"), int):
                column = max(0, int(np.searchsorted(first, step + shift, "right")) - 1)
                rows.setdefault((str(alert.get("rule", "")), str(alert.get("severity", ""))), Counter())[column] += 1
        return [{"rule": rule, "severity": severity, "marks": sorted(marks.items())} for (rule, severity), marks in rows.items()]

    @property
    def left_out(self) -> int:
        """How many `rows` leaves out."""
        return max(0, len(self.listed) - MAX_ALERTS)

    @property
    def rules(self) -> dict[str, int]:
        """How often each rule fired."""
        return dict(Counter(str(alert.get("rule", "")) for alert in self.began))

    def meanings(self) -> list[dict[str, str | list[str]]]:
        """What each rule that fired usually means and what to do, as its first alert says."""
        out: dict[str, dict[str, str | list[str]]] = {}
        for alert in self.began:
            extra = alert.get("extra")
            if isinstance(extra, Mapping):
                rule = str(alert.get("rule", ""))
                out.setdefault(rule, {"rule": rule, **{key: both(str(extra.get(key, ""))) for key in ("meaning", "next")}})
        return list(out.values())


def _in_order(alerts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """As `msprobe monitor analyze` has them; those that say that something is over behind those of their step."""
    ordered = sorted(alerts, key=lambda a: (a.get("step", 0), a.get("rank", 0), a.get("order", -1)))
    placed = [(alert, from_alert(alert, 0, {})) for alert in ordered]
    of = {id(anomaly): alert for alert, anomaly in placed if anomaly is not None}
    began = [of[id(located.anomaly)] for located in in_order(anomaly for _, anomaly in placed if anomaly is not None)]
    return sorted([*began, *(alert for alert, anomaly in placed if anomaly is None)], key=lambda a: a.get("step", 0))


def _is_over(alert: Mapping[str, Any]) -> bool:
    extra = alert.get("extra")
    return isinstance(extra, Mapping) and bool(extra.get("over"))
