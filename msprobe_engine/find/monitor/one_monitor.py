"""What `diagnose` says of the monitor output of one run: by its alerts, its numbers and its replicas."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from msprobe_engine.core.text.ranges import ranges_of
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import findings
from msprobe_engine.find.collectives.replicas import Odd, say_not_compared
from msprobe_engine.find.findings import Diagnosis, Suspect
from msprobe_engine.find.launch_line import again_alone
from msprobe_engine.find.monitor import same_batch
from msprobe_engine.find.monitor.growing_loss import name_loss
from msprobe_engine.find.monitor.number_pairs import every_series, series_of_tensors
from msprobe_engine.find.monitor.replicas import check_replicas
from msprobe_engine.find.monitor.suspects import MOST_SUSPECTS, module_of, record_of, row_of, say_again, suspect_of
from msprobe_engine.find.nonfinite.monitored import not_finite
from msprobe_engine.formats.monitor.alert_order import Group, in_order, merge_equal_alerts
from msprobe_engine.formats.monitor.anomalies import Anomaly, load
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import steps_of

_NONFINITE_RULES = ("nan_inf", "loss_not_finite")
_DESYNC_RULES = ("replica_mismatch",)


def diagnose_monitor(run: Run) -> Diagnosis:
    """One run: its alerts in the order of execution; without alerts the first number that is none; then replicas that differ."""
    diagnosis = Diagnosis()
    diagnosis.looked_at = {"monitor": str(run.path), "ranks": len(run.ranks)}
    loaded = load(run.path)
    groups = merge_equal_alerts(in_order(loaded.anomalies))
    critical = [group for group in groups if group.first.critical] or groups
    diagnosis.problems = loaded.missing + [f"{word} ({count})" for word, count in loaded.problems.items()]
    diagnosis.remarks = loaded.notes
    diagnosis.evidence += diagnosis.remarks
    if critical:
        first = critical[0].first
        diagnosis.finding, diagnosis.alert = _finding_of(first), True
        diagnosis.suspects = [_of_alerts(group) for group in critical[:MOST_SUSPECTS]]
        if len(loaded.anomalies) > 1:
            named, more = len(loaded.anomalies), sum(anomaly.more for anomaly in loaded.anomalies)
            said = Sentence(", {0} of them written by name", named) if more else ""
            diagnosis.evidence.append(Sentence("{0} alerts{1}; this is the first in the order of execution.", named + more, said))
            diagnosis.next.append(f"msprobe monitor analyze {shlex.quote(str(run.path))}")
        if first.next:
            diagnosis.evidence.append(Sentence("What the rule says to do: {0}", first.next))
        interval = _replica_check(run) or 1
        if diagnosis.finding == findings.DESYNC and interval > 1:
            template = "Copies of parameters were compared every {0} steps: these may differ since step {1}."
            diagnosis.evidence.append(Sentence(template, interval, max(first.step - interval + 1, 0)))
            diagnosis.next += again_alone("--preset watch --set monitor.replica_check.interval=1")
        else:
            diagnosis.next += say_again(first.step, list(first.ranks), diagnosis.finding)
        name_loss(diagnosis, run)
        return diagnosis
    numbers = _count(run)
    diagnosis.problems += [problem for word, count in run.problems.items() if (problem := f"{word} ({count})") not in diagnosis.problems]
    diagnosis.looked_at["numbers"] = numbers
    if not numbers:  # `found.problems` has that no step is there
        diagnosis.nothing = Sentence("There is nothing to judge: no alert and no number in it")
        return diagnosis
    items = list(not_finite(run))
    if items:
        bad = min(items, key=lambda item: (item.step, item.order, item.rank))
        diagnosis.finding = findings.NONFINITE
        diagnosis.suspects = [
            suspect_of(bad, Sentence("{0} is {1}: the first number in the order of execution that is not finite", bad.op, bad.target))
        ]
        diagnosis.next = say_again(bad.step, [bad.rank], diagnosis.finding)
        name_loss(diagnosis, run)
        return diagnosis
    replicas = check_replicas(run)
    if replicas.odd:
        diagnosis.finding = findings.DESYNC
        odd = sorted(replicas.odd, key=_spread, reverse=True)
        diagnosis.suspects = [_of_odd(copy) for copy in odd[:MOST_SUSPECTS]]
        diagnosis.evidence += replicas.evidence
        diagnosis.next = say_again(odd[0].step, sorted({odd[0].rank, *odd[0].others[:1]}), diagnosis.finding)
        return diagnosis
    if replicas.equal and (shared := same_batch.of_copies(run)):
        diagnosis.finding, diagnosis.suspects = findings.DATA, shared
        return diagnosis
    if replicas.equal:
        template = "Nothing found: no alert, no number that is not finite, no parameter whose statistics differ between ranks"
        diagnosis.nothing = Sentence(template)
    else:
        diagnosis.nothing = Sentence("Nothing found: no alert, no number that is not finite")
    if len(run.ranks) > 1 and not replicas.equal:
        say_not_compared(diagnosis, replicas.parted, _replica_check(run))
    diagnosis.evidence += [*_steps_looked_at(run), findings.ALONE]
    return diagnosis


def _steps_looked_at(run: Run) -> list[Sentence]:
    """In how many steps tensors were looked at, where not in all of a rank."""
    for rank in run.ranks:
        all_steps, looked_at = steps_of(every_series(run, rank)), steps_of(series_of_tensors(run, rank))
        if len(looked_at) < len(all_steps):
            template = "Tensors were looked at in {0} of {1} steps of rank {2}: what lasts a few steps may be missed."
            return [Sentence(template, len(looked_at), len(all_steps), rank)]
    return []


def _of_alerts(group: Group) -> Suspect:
    """Alerts that several ranks agree on."""
    alert = group.first
    why = alert.message or alert.meaning or f"rule {alert.rule}"
    numbers: Mapping[str, Any] = {"target": {"row": alert.name, alert.op or "value": alert.value}}
    record = row_of(alert.word, record_of(alert.name))
    judged = _finding_of(alert) == findings.DIVERGENCE and math.isfinite(alert.value)  # the others say in their headline what it is
    cause = _cause(alert) if judged else ""
    several = list(alert.differing) if len(alert.differing) > 1 else []
    agreeing = ranges_of(group.ranks) if not several and len(group.ranks) > 1 else []
    return Suspect(
        record,
        module_of(alert.name),
        alert.rank,
        alert.step,
        kind=alert.rule,
        why=why,
        cause=cause,
        tensor=alert.name,
        numbers=dict(numbers),
        ranks=several,
        on_ranks=agreeing,
    )


def _of_odd(odd: Odd) -> Suspect:
    return Suspect(odd.name, module_of(odd.name), odd.rank, odd.step, kind="desync", why=odd.why, tensor=odd.name, numbers=odd.numbers)


def _finding_of(alert: Anomaly) -> str:
    if alert.rule in _DESYNC_RULES:
        return findings.DESYNC
    if alert.rule in _NONFINITE_RULES or (not math.isfinite(alert.value) and alert.op in ("nans", "infs", "nan", "inf")):
        return findings.NONFINITE
    return findings.DIVERGENCE


def _cause(alert: Anomaly) -> Sentence:
    """The rule, and what it saw, as the line of the alert says it between the step and what was expected; else the value."""
    seen = re.search(rf"step {alert.step}(?: micro step \d+)?(?: after its update)?: (.+?); expected ", alert.message)
    return Sentence("{0}: {1}", alert.rule, seen[1]) if seen else Sentence("{0}, value {1}", alert.rule, f"{alert.value:.6g}")


def _replica_check(run: Run) -> int | None:
    """Every how many steps ``monitor.replica_check`` compared; None where it was off on a rank: an interval of 0, nothing to compare."""
    intervals: list[int] = []
    for rank in run.ranks:
        settings = run.info(rank).get("monitor")
        check = settings.get("replica_check") if isinstance(settings, dict) else None
        if not isinstance(check, dict) or not (check.get("parameters", True) or check.get("gradients", False)):
            return None
        interval = check.get("interval")
        if not isinstance(interval, int) or interval < 1:
            return None
        intervals.append(interval)
    return max(intervals, default=None)


def _spread(odd: Odd) -> float:
    """How far the copies of a parameter are from each other, of the size of the number."""
    rows = [row.get("value", ()) for row in odd.numbers.values()]
    pairs = (
        [(first, second) for first, second in zip(*rows) if isinstance(first, float) and isinstance(second, float)]
        if len(rows) == 2
        else []
    )
    sizes = [abs(first - second) / max(abs(first), abs(second)) for first, second in pairs if first != second]
    return max((size if math.isfinite(size) else math.inf for size in sizes), default=0.0)


def _count(run: Run) -> int:
    """How many tensors and numbers of the step were written, of all ranks and steps."""
    return sum(len(series.steps) for rank in run.ranks for series in every_series(run, rank))
