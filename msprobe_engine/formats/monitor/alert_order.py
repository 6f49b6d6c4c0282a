"""Puts alerts of all ranks into the order of execution, so that the first one is where it began.

A step is: the parameters as the last update left them; per micro batch the forward pass through the stages of the pipeline, the
loss, the backward pass the other way; the gradients that are complete on a rank; calls that follow the last backward call; reduction,
unscaling, clipping; the update. With virtual stages the forward pass goes through all stages once per virtual one. Within one stage the
call order of the rank counts.

The order is total: equal places are told apart by rank, name and rule, so it does not depend on the order in which files are read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core.io.json_text import dumps
from msprobe_engine.core.io.output_files import make_directory, replace_file
from msprobe_engine.core.text.ranges import in_short, ranks_text
from msprobe_engine.formats.monitor.anomalies import Anomaly, Found, load

OUTPUT = "anomaly_analyse.json"
_LAST = 1 << 40


class Moment(IntEnum):
    """Where in a step, in the order of execution; those from FORWARD to BACKWARD happen once per micro batch."""

    PARAMETERS = 0
    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    ACCUMULATED = 4
    AFTER = 5
    REDUCED = 6
    UNSCALED = 7
    NORM = 8
    CLIPPED = 9
    STATES = 10
    UPDATE = 11
    UPDATED = 12
    END = 13


WORDS = {
    Moment.PARAMETERS: "before the forward pass, in the parameters as the last update left them",
    Moment.FORWARD: "in the forward pass",
    Moment.LOSS: "in the loss",
    Moment.BACKWARD: "in the backward pass",
    Moment.ACCUMULATED: "in the gradients of a rank before they are reduced",
    Moment.AFTER: "after the backward pass",
    Moment.REDUCED: "in the gradients after they were reduced over ranks",
    Moment.UNSCALED: "in the gradients after the loss scale was taken off",
    Moment.NORM: "in the norm of all gradients",
    Moment.CLIPPED: "in the gradients after clipping",
    Moment.STATES: "in the states of the optimizer",
    Moment.UPDATE: "in what the optimizer adds to the parameters",
    Moment.UPDATED: "in the parameters after the update",
    Moment.END: "in a number of the whole step",
}
"""What a moment is, in plain language."""

_MOMENTS = {
    "param_origin": Moment.PARAMETERS,
    "actv": Moment.FORWARD,
    "attention_hook": Moment.FORWARD,
    "linear_hook": Moment.FORWARD,
    "moe_router_weight_hook": Moment.FORWARD,
    "moe_router_logit_hook": Moment.FORWARD,
    "loss": Moment.LOSS,
    "actv_grad": Moment.BACKWARD,
    "pre_grad": Moment.BACKWARD,
    "acc_grad": Moment.BACKWARD,
    "post_grad": Moment.REDUCED,
    "unscaled_grad": Moment.UNSCALED,
    "clipped_grad": Moment.CLIPPED,
    "exp_avg": Moment.STATES,
    "exp_avg_sq": Moment.STATES,
    "opt_state": Moment.STATES,
    "mg_direction": Moment.STATES,
    "update": Moment.UPDATE,
    "ratio": Moment.UPDATE,
    "param_updated": Moment.UPDATED,
    "step": Moment.END,
}
_PASSES = (Moment.FORWARD, Moment.LOSS, Moment.BACKWARD)
_BACKWARDS = (Moment.BACKWARD, Moment.ACCUMULATED, Moment.AFTER, Moment.REDUCED)


class Place(NamedTuple):
    """Where in the execution of a run; compares in that order.

    Attributes:
        section: 0 before the passes, 1 in the passes of the micro batches, 2 after them.
        moment: see `Moment`.
        stage: position among the stages of the pipeline, in the direction of this moment.
    """

    step: int
    section: int
    micro_step: int
    moment: Moment
    stage: tuple[int, int]


class Located(NamedTuple):
    """An alert and its place; sorts by execution."""

    place: Place
    call: int
    anomaly: Anomaly

    @property
    def key(self) -> tuple[Any, ...]:
        """Sorts; equal only for equal alerts."""
        alert = self.anomaly
        value = 0.0 if math.isnan(alert.value) else alert.value
        identity = alert.rank, alert.vpp_stage, alert.pp_stage, alert.name, alert.word, alert.phase, alert.micro_step, alert.op, alert.rule
        return self.place, self.call, *identity, math.isnan(alert.value), value, alert.critical, alert.message


@dataclass(frozen=True)
class Group:
    """Alerts of several ranks that say the same: one place in the execution, tensor, statistic and rule.

    Attributes:
        first: the earliest, on the lowest rank.
        ranks: all of them, ascending.
    """

    place: Place
    first: Anomaly
    ranks: list[int]


def order_of(word: str, micro_step: int) -> tuple[int, int, int]:
    """Sorts the tensors of a step by execution: section, micro batch, moment (see `Place`). Words that are not known come last."""
    moment = _MOMENTS.get(word, Moment.END)
    section = 0 if moment is Moment.PARAMETERS else 1 if moment in _PASSES else 2
    return section, max(micro_step, 0) if section == 1 else 0, int(moment)


def in_order(anomalies: Iterable[Anomaly]) -> list[Located]:
    anomalies = list(anomalies)
    earliest: dict[int, int] = {}
    for alert in anomalies:
        if _MOMENTS.get(alert.word) in _PASSES and alert.micro_step >= 0:
            earliest[alert.step] = min(alert.micro_step, earliest.get(alert.step, alert.micro_step))
    placed: list[Located] = []
    floating: list[Anomaly] = []
    for alert in anomalies:
        if (place := _place(alert, earliest)) is None:
            floating.append(alert)
        else:
            placed.append(Located(place, _call(alert), alert))
    placed += _by_call(floating, placed)
    return sorted(placed, key=lambda located: located.key)


def _call(alert: Anomaly) -> int:
    return alert.call if alert.call >= 0 else _LAST


def _place(alert: Anomaly, earliest: dict[int, int]) -> Place | None:
    """None when only the neighbours in the call order can tell."""
    moment = Moment.AFTER if alert.after_backward else _MOMENTS.get(alert.word)
    if moment is Moment.END and alert.name.endswith("grad_norm"):
        moment = Moment.NORM
    if moment is None:
        return None
    micro = alert.micro_step
    if alert.word in ("pre_grad", "acc_grad") and micro < 0:
        moment = Moment.ACCUMULATED
    if moment is Moment.LOSS and micro < 0:
        micro = earliest.get(alert.step, 0)  # the mean over micro batches: as early as anything else that is wrong in them
    stage = (-alert.vpp_stage, -alert.pp_stage) if moment in _BACKWARDS else (alert.vpp_stage, alert.pp_stage)
    if moment is Moment.PARAMETERS:
        return Place(alert.step, 0, 0, moment, stage)
    if moment in _PASSES:
        return Place(alert.step, 1, max(micro, 0), moment, stage)
    return Place(alert.step, 2, 0, moment, stage)


def _by_call(floating: Sequence[Anomaly], placed: Sequence[Located]) -> list[Located]:
    """Collectives happen anywhere: each gets the place of the alert of its rank that came before it, else of the one after it."""
    calls: dict[tuple[int, int], list[Located]] = {}
    for located in placed:
        if located.anomaly.call >= 0 and located.place.moment is not Moment.PARAMETERS:
            calls.setdefault((located.anomaly.rank, located.anomaly.step), []).append(located)
    for neighbours in calls.values():
        neighbours.sort(key=lambda located: located.key)
        neighbours.sort(key=lambda located: located.call)
    out = []
    for alert in floating:
        neighbours = calls.get((alert.rank, alert.step), [])
        before = [neighbour for neighbour in neighbours if neighbour.call <= alert.call]
        near = before[-1:] or neighbours[:1]
        place = near[0].place if near and alert.call >= 0 else Place(alert.step, 2, 0, Moment.REDUCED, (-alert.vpp_stage, -alert.pp_stage))
        out.append(Located(place, _call(alert), alert))
    return out


def merge_equal_alerts(ordered: Iterable[Located]) -> list[Group]:
    """Alerts that several ranks of a stage agree on as one, at the place of the first."""
    firsts: dict[tuple[Any, ...], Located] = {}
    ranks: dict[tuple[Any, ...], set[int]] = {}
    for located in ordered:
        alert = located.anomaly
        key = (located.place, alert.vpp_stage, alert.name, alert.word, alert.phase, alert.micro_step, alert.op, alert.rule)
        firsts.setdefault(key, located)
        ranks.setdefault(key, set()).update(alert.ranks)
    return [Group(first.place, first.anomaly, sorted(ranks[key])) for key, first in firsts.items()]


@dataclass(frozen=True)
class Analysis:
    """What `analyze` found.

    Attributes:
        groups: the first alerts, in order; at most as many as asked for.
        began: where it began: the first critical one of all, else the first.
        earlier: how many warnings came before it.
        count: alerts in all.
        path: the file that was written.
    """

    groups: list[Group]
    began: Group | None
    earlier: int
    count: int
    found: Found
    path: Path


def analyze(path: Path, output: Path | None = None, top: int = 8, steps: Collection[int] = ()) -> Analysis:
    """Read the alerts of a run, order them and write ``anomaly_analyse.json`` (the records of `top` alerts, in the existing shape,
    with ``ranks`` that agree).

    Args:
        output: directory of the file; None: that of the run.
        steps: only these; empty: all.

    Raises:
        UsageError: there is no run at `path`.
        SinkError: the file cannot be written.
    """
    read = load(path)
    wanted = [alert for alert in read.anomalies if not steps or alert.step in steps]
    groups = merge_equal_alerts(in_order(wanted))
    critical = next((i for i, group in enumerate(groups) if group.first.critical), 0)
    directory = output if output is not None else path if path.is_dir() else path.parent
    make_directory(directory, "analysis of alerts")
    target = directory / OUTPUT
    replace_file(target, dumps(_records(groups[:top])).encode())
    return Analysis(groups[:top], groups[critical] if groups else None, critical, len(wanted), read, target)


def _records(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for group in groups:
        alert = group.first
        key = base = f"{alert.tag}_step_{alert.step}_call_{alert.call}"
        number = 1
        while key in out:  # the existing tool keeps one statistic of a tensor
            key = f"{base}_{alert.op or alert.rule}" + (f"_{number}" if number > 1 else "")
            number += 1
        out[key] = {
            "rank": alert.rank,
            "step": alert.step,
            "micro_step": max(alert.micro_step, 0),
            "pp_stage": alert.pp_stage,
            "vpp_stage": alert.vpp_stage,
            "call_id": alert.call,
            "tag_name": alert.tag,
            "message": alert.message,
            "group_mates": list(alert.mates),
            "ranks": group.ranks,
            "when": WORDS[group.place.moment],
            "op": alert.op,
            "rule": alert.rule,
            "severity": "critical" if alert.critical else "warning",
            "value": alert.value,
        }
    return out


def summary(analysis: Analysis) -> str:
    """The result in plain language, several lines."""
    began = analysis.began
    if began is None:
        ranks = analysis.found.ranks
        looked = "".join(f"\n  {sentence}" for sentence in analysis.found.looked_at)
        partly = " so far" if analysis.found.running else ""
        partly += " in what could be read" if analysis.found.left_out else " in what is here" if analysis.found.missing else ""
        return (f"No alerts{partly} on {ranks_text(ranks)}." if ranks else f"No alerts{partly}.") + looked
    alert = began.first
    lines = [f"First alert: step {alert.step} {moment_text(began)}: {alert.name} on {_on_ranks(began.ranks)}{_pipeline_text(alert)}."]
    lines.append(f"  {alert.message}")
    if alert.meaning:
        lines.append(f"  What it usually means: {alert.meaning}")
    others = ". ".join(sentence for sentence in alert.next.split(". ") if "msprobe monitor analyze" not in sentence)  # this is it
    if others:
        lines.append(f"  What to do next: {others}")
    if not alert.critical:
        lines.append("  It is a warning; nothing critical was reported.")
    elif analysis.earlier:
        lines.append(f"  {analysis.earlier} warnings came before it; they are in the list below.")
    lines.append(f"The first {len(analysis.groups)} of {analysis.count} alerts in the order of execution:")
    for number, group in enumerate(analysis.groups, 1):
        alert = group.first
        op = f" {alert.op}" if alert.op else ""
        where = f"{_on_ranks(group.ranks)}{_pipeline_text(alert)}"
        lines.append(f"  {number}. step {alert.step} {moment_text(group)}: {alert.name}, {alert.rule}{op}, {where}")
    return "\n".join(lines)


def _on_ranks(ranks: Sequence[int]) -> str:
    return ranks_text(ranks) if len(ranks) == 1 else f"ranks {in_short(ranks)}"


def moment_text(group: Group) -> str:
    """When, in plain language."""
    micro = f" of micro step {group.place.micro_step}" if group.place.moment in _PASSES and group.first.micro_step >= 0 else ""
    return WORDS[group.place.moment] + micro


def _pipeline_text(alert: Anomaly) -> str:
    parts = [f"pipeline stage {alert.pp_stage}"] * bool(alert.pp_stage or len(alert.mates) > 1) + [
        f"virtual stage {alert.vpp_stage}"
    ] * bool(alert.vpp_stage)
    return f" ({', '.join(parts)})" if parts else ""
