"""Rule ``repeated_batch``: the models are given data again that they should not be given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import BATCH_AGE, ORDER_KEPT, Frame
from msprobe_engine.core.text.ranges import in_short
from msprobe_engine.probe.rules.alert_factory import is_excluded, scalar_alert
from msprobe_engine.probe.rules.arguments import CommonArgs, arg
from msprobe_engine.probe.rules.base import Rule

_log = get_logger()
_NAME = "batch"
ONE_BATCH, ONE_ORDER = "one batch", "one order"
"""What is passed over: all steps have had one batch; each epoch comes in one order."""
_FIRST = 2
"""Batches that may be others where all steps have one batch: a look at the data before the loop."""
_LONGER = 2
"""Times the longest row of equal batches before that a row has to be: several steps on each batch are meant."""


@dataclass(frozen=True, kw_only=True)
class RepeatedBatchArgs(CommonArgs):
    patience: int = arg(10, "steps in a row with the same batch, or in the order of the epoch before, before the rule fires", minimum=2)
    checks: int = arg(2, "checks in a row in which data-parallel ranks have the same batch before the rule fires", minimum=1)


class RepeatedBatchRule(Rule):
    """Warnings when the models are given the same bits in `patience` steps in a row and were given others before, in rows that were shorter
    by half; when data-parallel ranks are given the same (compared with ``monitor.replica_check``); and
    when a sampler that shuffles for several ranks gives the order of the epoch before.

    What may be meant is a line on the console and in ``diagnose``, and no alert: one batch from the start, to see whether the model can
    learn it, and epochs in the same order without such a sampler."""

    name = "repeated_batch"
    fires = (
        "the same batch for `patience` steps and other ones before, the same batches on data-parallel ranks, or the order of the epoch "
        "before although a DistributedSampler shuffles"
    )
    meaning = (
        "The iterator over the data is stuck or made anew in every step; the ranks do not share the data among them (DistributedSampler is "
        "missing); or sampler.set_epoch(epoch) is missing."
    )
    next = "look at the data loader: where its iterator is made, its sampler, set_epoch, and what a resumed run restores of it"
    all_kinds = ("step",)
    args_type = RepeatedBatchArgs
    remark = "batches"
    args: RepeatedBatchArgs
    passed_over: dict[str, Any]

    def setup(self) -> None:
        self.passed_over = {}
        self._row = self._longest = self._others = 0
        self._period = self._in_period = 0
        self._kept = False
        self._said: set[str] = set()
        self._equal: dict[tuple[int, ...], int] = {}

    def check(self, frame: Frame) -> list[Alert]:
        if not frame.complete or is_excluded(_NAME, self.args.exclude):
            return []
        age = int(frame.facts.get(BATCH_AGE, 0.0))
        self._kept |= ORDER_KEPT in frame.facts
        self._in_period = self._in_period + 1 if age == self._period else 1
        self._period = age
        if age == 1:
            self._row += 1
        else:
            self._longest, self._row, self._others = max(self._longest, self._row), 0, self._others + 1
            self._said.discard("stuck")
        if self._row >= self.args.patience and self._others <= _FIRST:
            text = "all steps so far have the same batch: right where the model shall learn one batch by heart"
            self._note(ONE_BATCH, self._row + 1, text)
        elif self._row >= self.args.patience and self._row > _LONGER * self._longest:
            return self._alert(frame, "stuck", f"the same batch in {self._row + 1} steps in a row", "another batch")
        elif age > 1 and self._in_period >= max(age, self.args.patience):
            if self._kept:
                seen = f"the batches of {self._in_period} steps come in the order of the epoch before, {age} steps ago"
                return self._alert(frame, "order", seen, "another order in each epoch, for which set_epoch is called")
            text = f"the batches come in the same order in every epoch of {age} steps: right where the data are not to be shuffled"
            self._note(ONE_ORDER, age, text)
        return []

    def _alert(self, frame: Frame, what: str, seen: str, expected: str) -> list[Alert]:
        if what in self._said:
            return []
        self._said.add(what)
        return [scalar_alert(frame, _NAME, "step", rule=self, value=frame.facts[BATCH_AGE], expected=expected, seen=seen)]

    def _note(self, what: str, steps: int, text: str) -> None:
        if not self.passed_over or self.passed_over["first"] == what:
            self.passed_over.update(first=what, steps=steps)
        if what not in self._said:
            self._said.add(what)
            _log.info("note: %s", text)

    def compare_ranks(self, step: int, ranks: Sequence[int], equal: bool) -> list[Alert]:
        """Alerts for the result of one check: were data-parallel ranks given the same batch? Called on one of them."""
        key = tuple(ranks)
        self._equal[key] = checks = self._equal.get(key, 0) + 1 if equal else 0
        what = f"ranks {in_short(ranks)}"
        if not checks:
            self._said.discard(what)
        if checks < self.args.checks or what in self._said or self._others <= _FIRST or is_excluded(_NAME, self.args.exclude):
            return []
        self._said.add(what)
        seen = f"data-parallel {what} were given the same batch in {checks} checks in a row"
        expected = "a part of the data for each of them"
        message = f"{self.name}: {_NAME}, step {step}: {seen}; expected {expected}"
        extra = {"ranks": list(ranks), **self.words}
        return [Alert(self.name, self.severity, "step", _NAME, step, ranks[0], float(checks), expected, message, extra=extra)]


def repeated_batch_rule(rules: Sequence[Rule]) -> RepeatedBatchRule | None:
    """The rule among `rules`, None when the settings have none: then nothing need be looked at."""
    return next((rule for rule in rules if isinstance(rule, RepeatedBatchRule)), None)
