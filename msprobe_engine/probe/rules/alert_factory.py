"""What the rules share: from positions that fired to alerts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.names import direction
from msprobe_engine.core.records import Entry, Frame, Sample
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.layout import Layout
from msprobe_engine.probe.rules.tensor_kinds import KINDS


def is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """True when the name contains one of the patterns."""
    return any(pattern in name for pattern in patterns)


def number(value: float) -> str:
    """A number for the console: short, without losing its order of magnitude."""
    return f"{value:.6g}"


def alert_at(
    frame: Frame,
    layout: Layout,
    i: int,
    *,
    rule: Rule,
    value: float,
    expected: str,
    seen: str,
    severity: str = "",
    extra: dict[str, Any] | None = None,
) -> Alert:
    """The alert for tensor `i` of the frame. `seen` is the value in words, as the message shows it; `severity` that of this
    alert where it is not the rule's."""
    source = layout.source(frame, i)
    name = layout.names[i]
    facts = {**(extra or {}), **rule.words}
    shown = name
    if layout.after_backward(frame, i):
        facts["after_backward"] = True
    if isinstance(source, Sample):
        facts["family"] = source.family
        if source.phase:
            facts["phase"] = source.phase
        if source.vpp_stage:
            facts["vpp_stage"] = source.vpp_stage
        for key in ("state", "column"):
            if key in source.extra:
                facts[key] = source.extra[key]
        shown = f"{name} ({source.family}{', ' + source.phase if source.phase else ''})"
    where = f"rank {frame.rank} step {frame.step}" + (f" micro step {source.micro_step}" if source.micro_step >= 0 else "")
    if isinstance(source, Entry) and direction(source.name) == "forward" and 0 <= frame.updated <= layout.order[i]:
        where += " after its update"
    return Alert(
        rule=rule.name,
        severity=severity or rule.severity,
        kind=KINDS[layout.kinds[i]],
        name=name,
        step=frame.step,
        rank=frame.rank,
        value=value,
        expected=expected,
        message=f"{rule.name}: {shown}, {where}: {seen}; expected {expected}",
        micro_step=source.micro_step,
        order=int(layout.order[i]),
        extra=facts,
    )


def scalar_alert(
    frame: Frame,
    name: str,
    kind: str,
    *,
    rule: Rule,
    value: float,
    expected: str,
    seen: str,
    severity: str = "",
    order: int | None = None,
    extra: dict[str, Any] | None = None,
) -> Alert:
    """The alert for a number of the step, or of several tensors: it comes after all tensors unless `order` says where."""
    return Alert(
        rule=rule.name,
        severity=severity or rule.severity,
        kind=kind,
        name=name,
        step=frame.step,
        rank=frame.rank,
        value=value,
        expected=expected,
        message=f"{rule.name}: {name}, rank {frame.rank} step {frame.step}: {seen}; expected {expected}",
        order=len(frame.entries) + len(frame.samples) if order is None else order,
        extra={**(extra or {}), **rule.words},
    )


def over_alert(frame: Frame, name: str, kind: str, *, rule: str, steps: int, more: int = 0) -> Alert:
    """The alert that says that something lasting has ended, after `steps` monitored steps."""
    rest = f" (and {more} more)" if more else ""
    return Alert(
        rule=rule,
        severity="warning",
        kind=kind,
        name=name,
        step=frame.step,
        rank=frame.rank,
        value=float(steps),
        expected="",
        message=f"{rule}: {name}{rest}, rank {frame.rank} step {frame.step}: over, after {steps} monitored steps",
        order=len(frame.entries) + len(frame.samples),
        extra={"over": True, **({"more": more} if more else {})},
    )


def note_rest(alerts: list[Alert], total: int) -> list[Alert]:
    """Say in the last alert how many more there were than are reported."""
    rest = total - len(alerts)
    if rest > 0 and alerts:
        last = alerts[-1]
        alerts[-1] = replace(last, message=f"{last.message} (and {rest} more)", extra={**last.extra, "more": rest})
    return alerts
