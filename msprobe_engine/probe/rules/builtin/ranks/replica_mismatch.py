"""Rule ``replica_mismatch``: from what the replica check found to alerts.

The comparison is made between ranks, outside of any frame. Its result is handed to `ReplicaMismatchRule.report`, and the alerts that come
back go to `Pipeline.alert`. The rule's settings decide severity, number and what is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.core.text.ranges import in_short
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.stateful_rule import LastingRule

Key = tuple[str, int, str, str]
"""Kind, virtual stage, name and group of a tensor."""


class Mismatch(NamedTuple):
    """One tensor that should be equal on the ranks of a group and is not.

    Attributes:
        kind: ``param`` or ``grad``.
        group: what the ranks are replicas of: ``dp``, ``tp``, ``expert_dp``, ``embedding``, ...
        ranks: global ranks that were compared.
        minority: those whose value differs from that of most; all of `ranks` when no value has a majority, none when nobody was asked.
        vpp_stage: virtual pipeline chunk.
        order: position in the order of execution, -1 when unknown.
        facts: JSON-ready, goes into the alert's `extra` (digests by rank).
    """

    name: str
    kind: str
    group: str
    ranks: Sequence[int]
    minority: Sequence[int]
    vpp_stage: int = 0
    order: int = -1
    facts: dict[str, Any] = {}

    @property
    def key(self) -> Key:
        return self.kind, self.vpp_stage, self.name, self.group


@dataclass(frozen=True, kw_only=True)
class ReplicaMismatchArgs(LastingArgs):
    recovery: int = arg(1, "checks without it after which it counts as ended, which is said, too", minimum=1)


class ReplicaMismatchRule(LastingRule[ReplicaMismatchArgs]):
    """Alerts for replicas that differ, each tensor once until it is equal again. `patience` and `recovery` count checks, not steps."""

    name = "replica_mismatch"
    fires = "parameters or gradients that have to be equal on several ranks are not (needs `monitor.replica_check`)"
    severity = "critical"
    meaning = (
        "Replicas drift apart: a gradient that is not reduced, a different seed or order of operations, or a fault of the hardware. "
        "It does not heal by itself."
    )
    next = (
        "ranks in a minority are the suspects, of two ranks both: dump a step there and on another rank and compare the records; one "
        "single rank and one single tensor point to its hardware"
    )
    all_kinds = ("param", "grad")
    args_type = ReplicaMismatchArgs

    def setup(self) -> None:
        self._running: dict[Key, list[int]] = {}

    def check(self, frame: Frame) -> list[Alert]:  # noqa: ARG002
        """Nothing: see `report`."""
        return []

    @property
    def running(self) -> bool:
        """Something differed in its last check."""
        return bool(self._running)

    def report(
        self,
        step: int,
        rank: int,
        mismatches: Sequence[Mismatch],
        kinds: Sequence[str] = ("param", "grad"),
        compared: Collection[Key] | None = None,
    ) -> list[Alert]:
        """Alerts for the result of one check.

        Args:
            mismatches: everything that differs in this check; empty when all is well.
            kinds: what this check looked at; what is running of other kinds stays.
            compared: what it compared, where that is a part of all; what is running of others stays.
        """
        wanted = [m for m in mismatches if m.kind in self.kinds and not self.left_out(m.name)]
        now = {m.key: m for m in wanted}
        begun: list[Mismatch] = []
        for key, mismatch in now.items():
            state = self._running.setdefault(key, [0, 0, 0])  # checks that failed, checks without it since, said
            state[0], state[1] = state[0] + 1, 0
            if not state[2] and state[0] >= self.args.patience:
                state[2] = 1
                begun.append(mismatch)
        over: list[tuple[Key, int]] = []
        for key, state in list(self._running.items()):
            if key in now or key[0] not in kinds or (compared is not None and key not in compared):
                continue
            state[1] += 1
            if not state[2] or state[1] >= self.args.recovery:
                del self._running[key]
                if state[2]:
                    over.append((key, state[0]))
        alerts = [self._alert(step, rank, mismatch) for mismatch in begun[: self.args.max_alerts]]
        if len(begun) > len(alerts):
            rest = len(begun) - len(alerts)
            last = alerts[-1]
            alerts[-1] = Alert(**{**vars(last), "message": f"{last.message} (and {rest} more)", "extra": {**last.extra, "more": rest}})
        if over:
            (kind, _, name, _), checks = over[0]
            rest_words = f" (and {len(over) - 1} more)" if len(over) > 1 else ""
            message = f"{self.name}: {name}{rest_words}, rank {rank} step {step}: over, after {checks} checks"
            alerts.append(Alert(self.name, "warning", kind, name, step, rank, float(checks), "", message, extra={"over": True}))
        return alerts

    def _alert(self, step: int, rank: int, m: Mismatch) -> Alert:
        what = "parameter" if m.kind == "param" else "reduced gradient"
        if not m.minority:
            seen = f"ranks {in_short(m.ranks)} ({m.group}) do not hold the same"
        elif len(m.minority) == len(m.ranks):
            unsure = "which one is wrong cannot be told"
            if len(m.ranks) == 2:
                seen = f"ranks {m.ranks[0]} and {m.ranks[1]} ({m.group}) differ; {unsure}"
            else:
                seen = f"ranks {in_short(m.ranks)} ({m.group}) differ, and no value has a majority; {unsure}"
        else:
            of = f"of {in_short(m.ranks)} ({m.group})"
            several = len(m.minority) > 1
            seen = f"rank{'s' * several} {in_short(m.minority)} {of} differ{'s' * (not several)} from the others"
        expected = "the same bits on all of them"
        facts = {**m.facts, "group": m.group, "ranks": list(m.ranks), "minority": list(m.minority)}
        if m.vpp_stage:
            facts["vpp_stage"] = m.vpp_stage
        return Alert(
            rule=self.name,
            severity=self.severity,
            kind=m.kind,
            name=m.name,
            step=step,
            rank=rank,
            value=float(len(m.minority)),
            expected=expected,
            message=f"{self.name}: {what} {m.name}, step {step}: {seen}; expected {expected}",
            order=m.order,
            extra={**facts, **self.words},
        )


def replica_rule(rules: Sequence[Rule]) -> ReplicaMismatchRule:
    """The replica rule among `rules`, or one with default settings: a check that was asked for always reports."""
    return next((rule for rule in rules if isinstance(rule, ReplicaMismatchRule)), None) or ReplicaMismatchRule()
