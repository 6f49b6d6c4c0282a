"""What `diagnose` says of monitor output: one run by its alerts, its numbers and its replicas; two runs by where their series part."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import NothingCapturedError
from msprobe_engine.core.text.ranges import ranges_of
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import findings
from msprobe_engine.find.collectives.replicas import Odd, say_not_compared
from msprobe_engine.find.findings import Diagnosis, Suspect
from msprobe_engine.find.launch_line import again_alone, again_both
from msprobe_engine.find.monitor import same_batch
from msprobe_engine.find.monitor.between_steps import changed_between
from msprobe_engine.find.monitor.growing_loss import name_loss
from msprobe_engine.find.monitor.kinds import cut_otherwise, of_other_form, other_kinds, rounded_in_one_run, world_size
from msprobe_engine.find.monitor.nearest import nearest_first
from msprobe_engine.find.monitor.not_finite import not_finite
from msprobe_engine.find.monitor.number_pairs import Number, every_series, paired_numbers
from msprobe_engine.find.monitor.one_run import never_there
from msprobe_engine.find.monitor.other_batches import (
    calls_cut_otherwise,
    leave_out_unequal,
    losses_over_ranks,
    not_comparable,
    ranks_of_one_side,
    without_call,
)
from msprobe_engine.find.monitor.other_scale import without_scale
from msprobe_engine.find.monitor.replicas import check_replicas
from msprobe_engine.find.monitor.series_noise import SeriesNoise
from msprobe_engine.find.nonfinite.report import again_with_operators
from msprobe_engine.find.nonfinite.trace import module_path
from msprobe_engine.formats.monitor.alert_order import Group, in_order, merge_equal_alerts
from msprobe_engine.formats.monitor.anomalies import Anomaly, load
from msprobe_engine.formats.monitor.completeness import began_later, missing_parts, other_runs, steps_on_one_side, still_running
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Key

_NONFINITE_RULES = ("nan_inf", "loss_not_finite")
_DESYNC_RULES = ("replica_mismatch",)
MOST_SUSPECTS = 20


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
            diagnosis.evidence.append(Sentence("{0} alerts; this is the first in the order of execution.", len(loaded.anomalies)))
            diagnosis.next.append(f"msprobe monitor analyze {shlex.quote(str(run.path))}")
        if first.next:
            diagnosis.evidence.append(Sentence("What the rule says to do: {0}", first.next))
        interval = _replica_check(run) or 1
        if diagnosis.finding == findings.DESYNC and interval > 1:
            template = "Copies of parameters were compared every {0} steps: these may differ since step {1}."
            diagnosis.evidence.append(Sentence(template, interval, max(first.step - interval + 1, 0)))
            diagnosis.next += again_alone("--preset watch --set monitor.replica_check.interval=1")
        else:
            diagnosis.next += _again(first.step, list(first.ranks), diagnosis.finding)
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
            _suspect(bad, Sentence("{0} is {1}: the first number in the order of execution that is not finite", bad.op, bad.target))
        ]
        diagnosis.next = _again(bad.step, [bad.rank], diagnosis.finding)
        name_loss(diagnosis, run)
        return diagnosis
    replicas = check_replicas(run)
    if replicas.odd:
        diagnosis.finding = findings.DESYNC
        odd = sorted(replicas.odd, key=_spread, reverse=True)
        diagnosis.suspects = [_of_odd(copy) for copy in odd[:MOST_SUSPECTS]]
        diagnosis.evidence += replicas.evidence
        diagnosis.next = _again(odd[0].step, sorted({odd[0].rank, *odd[0].others[:1]}), diagnosis.finding)
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
    diagnosis.evidence.append(findings.ALONE)
    return diagnosis


def diagnose_two_monitors(target: Run, golden: Run, exact: bool = False) -> Diagnosis:
    """Two runs: the first step, and in it the first tensor in the order of execution, whose numbers part by more than before
    (`find.monitor.nearest`).

    Args:
        target, golden: the run in question, and the golden one.

    Raises:
        NothingCapturedError: there is no number that both have.
    """
    diagnosis = Diagnosis()
    items, alone = paired_numbers(target, golden)
    apart, said_apart = not_comparable(target, golden)
    cut = cut_otherwise(target, golden, apart)
    apart |= cut.families
    unlike = of_other_form(target, golden) | cut.tensors
    calls, said_calls = calls_cut_otherwise(target, golden) if not apart else (set(), [])
    items = [
        item
        for item in items
        if item.family not in apart and (item.rank, item.family, item.key) not in unlike and item.key.name not in cut.totals
        if not item.family.startswith("actv") or (item.rank, without_call(item.key.name)) not in calls
    ]
    if not items:
        why = [*missing_parts(target), *missing_parts(golden)] or ["is it the same training?"]
        raise NothingCapturedError("; ".join([f"{target.path} and {golden.path}: no rank, step and tensor in common", *why]))
    means = set(losses_over_ranks(target, golden)) if apart == {"loss"} else set()
    losses_agree = bool(means)
    items += means
    noise = SeriesNoise(target, golden)
    ranks_of_both = world_size(target), world_size(golden)
    items, said_scale = without_scale(items, noise.of_gradients, ranks_of_both[0] / ranks_of_both[1] if all(ranks_of_both) else 1.0)
    diagnosis.evidence += said_scale
    by_step: dict[int, list[Number]] = {}
    for item in items:
        by_step.setdefault(item.step, []).append(item)
    largest: Number | None = None
    alone_off: _Off | None = None
    for step in sorted(by_step):
        noise.add_step(by_step[step])
        limits = {item: 0.0 if exact else noise.limit(item) for item in by_step[step] if item.distance}
        losses_agree &= leave_out_unequal(limits, means)
        off = nearest_first((item for item, limit in limits.items() if item.distance > limit), by_step[step])
        largest = max((number for number in (largest, *limits) if number is not None), key=lambda number: number.distance, default=None)
        if off and alone_off is None and not exact and noise.may_pass(off, limits):
            alone_off = _Off(off, limits, len(by_step[step]))
            continue
        if off:
            alone_off = alone_off or _Off(off, limits, len(by_step[step]))
            _say_part(diagnosis, alone_off)
            diagnosis.next = _again(alone_off.items[0].step, [alone_off.items[0].rank], diagnosis.finding, golden=True)
            break
        noise.accept(step, limits)
        if alone_off is not None and alone_off.is_answered(by_step[step]):
            alone_off = None
    if losses_agree:
        said_apart = []
        diagnosis.evidence.append(Sentence("Each rank has the loss of its own part of the batch: the mean over the ranks was compared."))
    shapes, types, computed = other_kinds(target, golden, cut)
    families_and_names = ((number, *number.record.partition("/")[::2]) for number in shapes)
    shapes = [number for number, family, name in families_and_names if family not in apart and (number.rank, name) not in calls]
    # what one run has no number of, and what was changed before a step begins, comes before all that differs in the step
    for finding, suspects in (
        (findings.STRUCTURE, sorted([*never_there(target, golden, apart, calls), *shapes], key=lambda number: number.step)),
        (findings.DIVERGENCE, changed_between(target, golden)),
    ):
        first = diagnosis.first_suspect
        if suspects and (first is None or suspects[0].step <= first.step):
            diagnosis.finding, diagnosis.suspects = finding, [*suspects, *diagnosis.suspects][:MOST_SUSPECTS]
    diagnosis.evidence += types
    diagnosis.problems = [
        *missing_parts(target),
        *missing_parts(golden),
        *steps_on_one_side(target, golden),
        *said_apart,
        *cut.said,
        *said_calls,
    ]
    diagnosis.remarks = [
        *(said for of_runs in (still_running, other_runs) for run in (target, golden) for said in of_runs(run)),
        *began_later(target, golden),
    ]
    diagnosis.evidence += diagnosis.remarks
    diagnosis.problems += [_said_alone((golden if k else target).path, names) for k, names in enumerate(alone) if names]
    diagnosis.problems += [f"{word} ({count})" for run in (target, golden) for word, count in run.problems.items()]
    if not diagnosis.suspects:
        diagnosis.evidence.append(_say_largest(largest))
        if not computed and not cut.tensors and (rounded := rounded_in_one_run(target, golden, items)) is not None:
            computed = [rounded]
        if computed:  # numbers that agree within the round-off of another type are no all-clear
            diagnosis.finding, diagnosis.suspects = findings.STRUCTURE, computed
        diagnosis.problems += [] if alone_off is None else [alone_off.sentence()]
    diagnosis.problems += ranks_of_one_side(target, golden, apart)
    steps = sorted(by_step)
    ranks = len(set(target.ranks) & set(golden.ranks))
    diagnosis.looked_at = {"steps": f"{steps[0]} to {steps[-1]}", "ranks": ranks, "numbers": len(items)}
    return diagnosis


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


def _say_largest(item: Number | None) -> Sentence:
    """How far the runs are apart where nothing is off."""
    if item is None:
        return Sentence("All numbers are the same.")
    template = "The largest difference is {0} of a number: step {1}, rank {2}, {3}, {4} {5} against {6}."
    row, numbers = f"{item.family}/{item.key.name}", (f"{item.target:.7g}", f"{item.golden:.7g}")
    return Sentence(template, f"{item.distance:.1e}", item.step, item.rank, row, item.op, *numbers)


def _again(step: int, ranks: Sequence[int], finding: str, golden: bool = False) -> list[str]:
    """What would name the operator: a dump of the step, which numbers of the monitor do not replace; of a NaN, which another run may have
    in another step, the operators of the last steps."""
    if finding == findings.NONFINITE and not golden:
        return again_with_operators()
    options = f"--preset dump --set 'dump.step=[{step}]' --set 'dump.rank=[{','.join(map(str, ranks))}]'"
    if golden:
        return again_both(options)
    return again_alone(options)


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


@dataclass(frozen=True)
class _Off:
    """Numbers of a step that differ by more than round-off explains.

    Attributes:
        items: nearest to the cause first.
        limits: what would be accepted.
        of: how many numbers were compared in the step.
    """

    items: Sequence[Number]
    limits: Mapping[Number, float]
    of: int

    def is_answered(self, later: Iterable[Number]) -> bool:
        """Were any of them looked at again?"""
        places = {(item.rank, item.family, item.key, item.op) for item in self.items}
        return any((item.rank, item.family, item.key, item.op) in places for item in later)

    def sentence(self) -> Sentence:
        """Of a step that no later one answers."""
        first = self.items[0]
        template = "{0} numbers of step {1} differ by up to {2}, which no later step confirms or clears, the first is {3}"
        furthest = max(item.distance for item in self.items)
        return Sentence(template, f"{len(self.items):,}", first.step, f"{furthest:.2%}", _row(first.family, first.key.name))


def _say_part(diagnosis: Diagnosis, parted: _Off) -> None:
    off, limits, of = parted.items, parted.limits, parted.of
    first = off[0]
    bad = not math.isfinite(first.target) and math.isfinite(first.golden)
    diagnosis.finding = findings.NONFINITE if bad else findings.DIVERGENCE
    seen: dict[tuple[str, Key], Number] = {}
    ranks: dict[tuple[str, Key], set[int]] = {}
    for item in off:
        seen.setdefault((item.family, item.key), item)
        ranks.setdefault((item.family, item.key), set()).add(item.rank)
    for item in list(seen.values())[:MOST_SUSPECTS]:
        share = f"{item.distance:.2%}" if item.distance >= 1e-3 else f"{item.distance:.1e}"
        size = Sentence("an infinite amount") if math.isinf(item.distance) else share
        diagnosis.suspects.append(
            _suspect(
                item,
                Sentence(
                    "{0} is {1}, in the golden run {2}: {3} ({4} would be accepted)",
                    item.op,
                    f"{item.target:.6g}",
                    f"{item.golden:.6g}",
                    size,
                    f"{limits[item]:.1e}",
                ),
                limits[item],
            )
        )
        agreeing = sorted(ranks[item.family, item.key])
        diagnosis.suspects[-1].on_ranks = ranges_of(agreeing) if len(agreeing) > 1 else []
        if item.op == "value":  # a number of the step: learning rate, loss, loss scale, norm of all gradients
            name = item.key.name.rpartition("/")[2]
            diagnosis.suspects[-1].cause = Sentence("{0} {1}, golden {2}", name, f"{item.target:.6g}", f"{item.golden:.6g}")
    diagnosis.differences = len(seen)
    diagnosis.evidence.append(
        Sentence(
            "Step {0}: {1} of {2} numbers differ by more than round-off explains; all steps before agree.",
            first.step,
            f"{len(off):,}",
            f"{of:,}",
        )
    )


def _said_alone(path: Path, names: Sequence[str]) -> Sentence:
    if len(names) == 1:
        return Sentence("{0}: 1 number of a step that both runs have is not in the other run and was not compared: {1}", path, names[0])
    template = "{0}: {1} numbers of steps that both runs have are not in the other run and were not compared, the first is {2}"
    return Sentence(template, path, f"{len(names):,}", names[0])


def _count(run: Run) -> int:
    """How many tensors and numbers of the step were written, of all ranks and steps."""
    return sum(len(series.steps) for rank in run.ranks for series in every_series(run, rank))


def _finding_of(alert: Anomaly) -> str:
    if alert.rule in _DESYNC_RULES:
        return findings.DESYNC
    if alert.rule in _NONFINITE_RULES or (not math.isfinite(alert.value) and alert.op in ("nans", "infs", "nan", "inf")):
        return findings.NONFINITE
    return findings.DIVERGENCE


def _row(family: str, name: str) -> str:
    """``grad_reduced/layers.0.weight``; the loss, which is a family of its own, as it is."""
    return name if name == family else f"{family}/{name}"


def _cause(alert: Anomaly) -> Sentence:
    """The rule, and what it saw, as the line of the alert says it between the step and what was expected; else the value."""
    seen = re.search(rf"step {alert.step}(?: micro step \d+)?(?: after its update)?: (.+?); expected ", alert.message)
    return Sentence("{0}: {1}", alert.rule, seen[1]) if seen else Sentence("{0}, value {1}", alert.rule, f"{alert.value:.6g}")


def _of_alerts(group: Group) -> Suspect:
    """Alerts that several ranks agree on."""
    alert = group.first
    why = alert.message or alert.meaning or f"rule {alert.rule}"
    numbers: Mapping[str, Any] = {"target": {"row": alert.name, alert.op or "value": alert.value}}
    record = _row(alert.word, _record_of(alert.name))
    judged = _finding_of(alert) == findings.DIVERGENCE and math.isfinite(alert.value)  # the others say in their headline what it is
    cause = _cause(alert) if judged else ""
    several = list(alert.differing) if len(alert.differing) > 1 else []
    agreeing = ranges_of(group.ranks) if not several and len(group.ranks) > 1 else []
    return Suspect(
        record,
        _module_of(alert.name),
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
    return Suspect(odd.name, _module_of(odd.name), odd.rank, odd.step, kind="desync", why=odd.why, tensor=odd.name, numbers=odd.numbers)


def _suspect(item: Number, why: str, limit: float | None = None) -> Suspect:
    row = _row(item.family, item.key.name)
    return Suspect(
        record=row,
        module=_module_of(item.key.name),
        rank=item.rank,
        step=item.step,
        kind="series",
        why=why,
        tensor=f"{row}.{item.op}",
        numbers={"target": {"row": row, item.op: item.target}} | ({"golden": {"row": row, item.op: item.golden}} if limit else {}),
        distance=item.distance if limit else None,
        limit=limit,
    )


_TENSOR = re.compile(r"(\.(weight|bias|input|output)(\.\d+)?|[.:](input|output)(\.\d+)?)$")


_CALL = re.compile(r"(.+\.(?:forward|backward)(?:\.\d+)?)\.(?:input|output)(?:[._].*)?", re.DOTALL)


def _record_of(name: str) -> str:
    """The record of a call that the monitor watches, without the tensor; other names as they are."""
    call = _CALL.fullmatch(name)
    return call[1] if call else name


def _module_of(name: str) -> str:
    """Path of the module that a parameter or activation belongs to; "" of a function."""
    record = _record_of(name)
    if record != name:
        return module_path(record)
    return _TENSOR.sub("", name) if "." in name else ""
