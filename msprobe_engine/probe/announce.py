"""Alerts on the console: the first lines in full, then counts. A NaN that spreads makes a thousand alerts in a step, and keeps
making them in every step that follows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.log import get_logger

_log = get_logger()

LINES_PER_STEP = 3
_LIKE_THESE = ("line like these", "lines like these")
REPEAT_EVERY = 100
QUIET = 20
"""Steps, twice the interval of preset watch."""
_STAYING = frozenset(("nan_inf", "loss_not_finite"))


class Announcer:
    """Says what the rules found.

    The first step with alerts of a rule shows `LINES_PER_STEP` lines; the step after it one line, and then one line for every
    `REPEAT_EVERY` further steps. A step without alerts of the rule starts it anew; of numbers that are not finite, which stay so and are
    looked at every few steps, `QUIET` steps without do. Files and metrics hold every alert.
    """

    def __init__(self) -> None:
        self._running: dict[str, int] = {}
        self._quiet: dict[str, int] = {}  # rule -> steps since its last alert

    def will_say(self, alerts: Sequence[Alert]) -> bool:
        """Would `say` show a line of these?"""
        return any(_is_shown(self._running.get(rule, 0) + 1) for rule in {alert.rule for alert in alerts})

    def say(self, alerts: Sequence[Alert]) -> None:
        by_rule: dict[str, list[Alert]] = {}
        for alert in alerts:
            by_rule.setdefault(alert.rule, []).append(alert)
        self._quiet = {rule: 0 if rule in by_rule else self._quiet.get(rule, 0) + 1 for rule in {*self._running, *by_rule}}
        self._running = {rule: count for rule, count in self._running.items() if self._quiet[rule] <= (QUIET if rule in _STAYING else 0)}
        for rule, found in by_rule.items():
            steps = self._running[rule] = self._running.get(rule, 0) + 1
            level = logging.ERROR if any(a.severity == "critical" for a in found) else logging.WARNING
            if steps == 1:
                for alert in found[:LINES_PER_STEP]:
                    _log.log(level, "ALERT %s", alert.message)
                if len(found) > LINES_PER_STEP:
                    more = len(found) - LINES_PER_STEP
                    _log.log(level, "ALERT %s: and %d more %s in step %d", rule, more, _LIKE_THESE[more > 1], found[0].step)
            elif all(alert.extra.get("over") for alert in found):
                if _is_shown(steps):
                    _log.log(level, "ALERT %s", found[0].message)
            elif _is_shown(steps):
                first = found[0]
                _log.log(
                    level, "ALERT %s goes on, %d in step %d (every %d steps): %s", rule, len(found), first.step, REPEAT_EVERY, first.message
                )


def _is_shown(steps: int) -> bool:
    """Has this step with alerts of a rule, counted from 1, a line?"""
    return steps == 1 or (steps - 2) % REPEAT_EVERY == 0
