"""``msprobe nan_analyze`` of the output directory of a run: its dump, its incidents and what its monitor has seen.

What names a record leads, and of those the earliest step. A dump of chosen steps without a NaN says nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError, NothingCapturedError, ProbeError
from msprobe_engine.core.text.ranges import ranks_text
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import run_directory
from msprobe_engine.find.detect import Run
from msprobe_engine.find.nonfinite import report
from msprobe_engine.find.nonfinite.monitored import not_finite
from msprobe_engine.find.nonfinite.nan_analyze import Result, nan_analyze
from msprobe_engine.formats.dump.replicas.reader import StepTables
from msprobe_engine.formats.monitor.alert_order import in_order
from msprobe_engine.formats.monitor.anomalies import Anomaly, load
from msprobe_engine.formats.monitor.reader import Run as MonitorRun

_RULES = ("nan_inf", "AnomalyNan")
"""Ours and that of the existing tool: with one of them every step was looked at, and its alerts are all there is."""
_OF_CALLS = ("actv", "actv_grad")


@dataclass(frozen=True)
class _Part:
    what: str
    result: Result

    @property
    def order(self) -> tuple[bool, bool, int]:
        first = self.result.findings[0] if self.result.findings else None
        return first is None, first is not None and first["cause"] == "sample", 0 if first is None else first["step"]


def nan_analyze_run(source: str | Path, scheduler: str = "") -> Result:
    """Find the first NaN/Inf in everything that lies at `source`.

    Args:
        source: output directory of a run, or what `nan_analyze` takes.
        scheduler: address of a Dask scheduler (``tcp://host:8786``) whose workers read the dumps; "": they are read here.

    Raises:
        MissingExtraError: Dask is not installed.
        UsageError: no cluster answers at `scheduler`.
        DumpFormatError: there is nothing that could be looked at.
        NothingCapturedError: there is, and nothing in it can be read.
    """
    run = Run(Path(source))
    tables = StepTables(0, scheduler)  # each step is read once
    if not run.incidents and not run.unread and not run.has_monitor:
        return _with_limits(nan_analyze(run, tables=tables))
    seen: list[_Part] = []
    errors: list[ProbeError] = [*run.unread]

    def try_part(what: str, analyze: Callable[[], Result]) -> None:
        try:
            seen.append(_Part(what, analyze()))
        except (DumpFormatError, NothingCapturedError) as error:
            errors.append(error)

    if run.records is not None:
        try_part("dump", lambda: _with_limits(nan_analyze(run, tables=tables)))
    for incident in run.incidents[: run_directory.MOST_INCIDENTS]:
        place = f"incident {incident.path.name}"
        try_part(place, lambda incident=incident: _with_limits(nan_analyze(incident, tables=tables)))  # type: ignore[misc]
    if run.has_monitor:
        recorded = {step for part in seen for step in part.result.steps}
        try_part("monitor", lambda: _of_monitor(run.monitor, recorded))
    if not seen:
        raise errors[0]
    return _together(run.path, seen, errors, len(run.incidents))


def _with_limits(result: Result) -> Result:
    """With what its records could not show, where they show nothing."""
    if result.only_modules and not result.findings:
        result.text += f"\n{report.WITHIN}"
    return result


def _together(root: Path, seen: Sequence[_Part], errors: Sequence[ProbeError], incidents: int) -> Result:
    lead, *others = sorted(seen, key=lambda part: part.order)
    result = lead.result
    later = incidents - run_directory.MOST_INCIDENTS
    problems = [problem for part in seen for problem in part.result.problems] + [
        Sentence("not looked at: {0}", "; ".join(map(str.strip, str(error).splitlines()))) for error in errors
    ]
    if later > 0 and not result.findings:
        problems.append(Sentence("{0}: {1} later incidents were not looked at", root, later))
    texts = [_format_part(lead)] + [
        f"{part.what}: {_first_line(part.result)}" if result.findings else _format_part(part) for part in others
    ]
    out = Result(result.findings, "\n".join(texts), sorted({step for part in seen for step in part.result.steps}))
    out.problems = list(dict.fromkeys(problems))
    if not out.steps and not out.findings:
        raise NothingCapturedError(f"{root}: there is no step to look at" + "".join(f"\n  {problem}" for problem in out.problems))
    return out


def _format_part(part: _Part) -> str:
    """The finding comes first, and then what it was read from."""
    if part.what == "dump":
        return part.result.text
    return f"{part.result.text}\nRead from: {part.what}." if part.result.findings else f"{part.what}:\n{part.result.text}"


def _first_line(result: Result) -> str:
    return result.text.partition("\n")[0]


def _of_monitor(run: MonitorRun, recorded: Collection[int]) -> Result:
    """Its alerts, and its numbers where no rule has looked at them. Of activations in steps whose calls are recorded these tell more: an
    infinity that was gone again before the end does not matter."""
    loaded, path = load(run.path), run.path
    items: list[Mapping[str, Any]]
    alerts = [located.anomaly for located in in_order(loaded.anomalies) if located.anomaly.rule in _RULES]
    telling = [alert for alert in alerts if alert.step not in recorded or alert.word not in _OF_CALLS]
    if alerts:
        items = [_of_alert(alert, path) for alert in telling if alert.step == telling[0].step]
    else:
        unwatched = [rank for rank in run.ranks if not _is_watched(run.info(rank))]
        numbers = [number for number in (not_finite(run) if unwatched else ()) if number.rank in unwatched]
        numbers.sort(key=lambda number: (number.step, number.order, number.rank))
        items = [_build_finding(n.step, n.rank, n.family, n.key.name, f"{n.op} is {n.target}", path) for n in numbers[:1]]
    problems = [*loaded.missing, *(f"{what} ({count})" for what, count in loaded.problems.items())]
    problems += [said for what, count in run.problems.items() if (said := f"{what} ({count})") not in problems]
    steps = sorted({step for rank in run.ranks for step in run.recorded_steps(rank)[0]})
    if items:
        return Result(items, "\n".join(report.lines_of(items[:1], first=True)), steps, problems)
    span = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}" if steps else "no step"
    beside = " beside what the recorded calls are judged by" if alerts else ""
    return Result([], f"{span}: no NaN or Inf that a rule or a number tells of{beside}, {ranks_text(run.ranks)}.", steps, problems)


def _is_watched(info: Mapping[str, Any]) -> bool:
    rules = info.get("rules")
    return isinstance(rules, list) and any(rule in _RULES for rule in rules)


def _of_alert(alert: Anomaly, path: Path) -> dict[str, Any]:
    return _build_finding(alert.step, alert.rank, alert.word, alert.name, alert.message, path)


def _build_finding(step: int, rank: int, family: str, name: str, note: str, path: Path) -> dict[str, Any]:
    """A finding with the keys of `report.build_finding`; no call is known."""
    return {
        "op_name": name, "data_info": {}, "construct_info": [name], "stack_info": [], "step": step, "rank": rank, "what": "NaN or Inf",
        "cause": "sample", "explanation": report.CAUSES["sample"], "why": "", "module": "", "operator": family,
        "direction": "backward" if "grad" in family else "forward", "source_line": None, "tensors": [], "notes": [note],
        "clean_calls_before": [], "spread": [], "dump": str(path), "complete": True,
    }  # fmt: skip
