"""``incident.json`` and ``summary.md`` from the rank files that are there.

`merge` is a function of the rank files alone, so it may run on any rank, any number of times. Ranks race without a lock: the file is
replaced by rename, and whoever has replaced it looks again whether a rank file has come or changed meanwhile. The last one to
replace it therefore has seen all.

Not every rank merges: in a job of thousands each of them would read the files of all. Who has finished its own file adds a line to the
file ``finished``; its size tells how many have, and some of these numbers are called to merge (`finish`): the first few, so that there is
something to read soon, three on the way to a thousand, and the last one: little more than one file read for each rank. Ranks that die
never make the number full: the rank that announced the incident looks after it in later steps, and others should it die
(`merge_if_behind`).

Schema of incident.json (version 1): ``version``; ``id``, ``step``, ``rule``, ``message``, ``announced_by``, ``capture_step`` (earliest
announcement); ``world_size``; ``ranks_complete``, ``ranks_writing``, ``ranks_missing`` (lists of ranks); ``ranks_late``; ``steps`` (ring
steps by any rank); ``began`` ({step, ranks, pp_stage, name, rule, when}: the earliest alert of all ranks in the order of execution,
critical ones before warnings, or null); ``capture`` ({level, first_step, steps} or null); ``alerts`` (in the order of execution; of ranks
that say the same the lowest one's, with ``ranks`` as ranges; each rank's own are in its file); ``rerun`` (rank to what a second run of the
step showed, see `again`; empty when there was none); ``first_nonfinite`` (one per rank that has one, earliest step first: {rank, step,
name, statistics}); ``worst`` (list); ``lost`` (reason to count).
Numbers that JSON cannot hold are the strings "NaN", "Infinity", "-Infinity".
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.regular_files import open_regular
from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.ranges import few_ranges, in_short, ranges_of
from msprobe_engine.probe.incident.files import write_json, write_text
from msprobe_engine.probe.incident.pieces import Pieces, marks_of

INCIDENT = "incident.json"
SHOWN = 20


FINISHED = "finished"
"""A line of `_LINE` bytes for each time that a rank has finished its file."""
_LINE = 8
_FIRST_ONES = 16
_ON_THE_WAY = (64, 256, 1024)
"""So many ranks merge in any case, and these."""


def finish(directory: Path, rank: int, world_size: int) -> None:
    """Say that this rank's file is complete, and merge when it is this rank's turn.

    Raises:
        OSError: something cannot be written.
    """
    descriptor = open_regular(directory / FINISHED, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, b"%*d\n" % (_LINE - 1, rank % 10 ** (_LINE - 1)))
        number = os.fstat(descriptor).st_size // _LINE
    finally:
        os.close(descriptor)
    if is_called(number, world_size):
        merge(directory)


def is_called(number: int, world_size: int) -> bool:
    """Does the rank that finishes as the `number`-th merge? Ranks may finish more than once."""
    return number <= _FIRST_ONES or number in _ON_THE_WAY or number % world_size == 0


def merge_if_behind(directory: Path) -> None:
    """Merge, unless the merged file is younger than all rank files: for when those that would have merged are dead.

    Raises:
        OSError: something cannot be read or written.
    """
    newest = max((time for time, *_ in marks_of(directory).values()), default=None)
    merged = directory / INCIDENT
    if newest is not None and not (merged.exists() and merged.stat().st_mtime_ns > newest):
        merge(directory)


def merge(directory: Path) -> None:
    """Write incident.json and summary.md of an incident directory.

    Raises:
        OSError: they cannot be written.
    """
    pieces = Pieces(directory)
    for _ in range(100):  # bounded: a rank file changes twice at most
        written = pieces.read()
        if not written:
            return
        incident = combine(written)
        write_json(directory / INCIDENT, incident)
        write_text(directory / "summary.md", summary(incident, str(directory)))
        if marks_of(directory) == pieces.marks:
            return


def combine(pieces: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The content of incident.json."""
    events = [(piece["event"], rank) for rank, piece in pieces.items()]
    # of several accounts of one event that of the rank that announced it says most
    event = min(events, key=lambda e: (e[0].get("step", 0), e[0].get("rank", 0), e[0].get("rank") != e[1]))[0]
    world = max(int(piece.get("world_size", 1)) for piece in pieces.values())
    first = [{"rank": rank, **piece["first_nonfinite"]} for rank, piece in pieces.items() if piece.get("first_nonfinite")]
    captures = [piece["capture"] for piece in pieces.values() if piece.get("capture")]
    lost: dict[str, int] = {}
    for piece in pieces.values():
        for reason, count in (piece.get("lost") or {}).items():
            lost[reason] = lost.get(reason, 0) + int(count)
    alerts, began = _in_order(pieces)
    worst = ((rank, item) for rank, piece in pieces.items() for item in piece.get("worst") or ())
    return {
        "version": 1,
        "id": event.get("id"),
        "step": event.get("step"),
        "rule": event.get("rule"),
        "message": event.get("message"),
        "announced_by": event.get("rank"),
        "capture_step": event.get("capture_step"),
        "world_size": world,
        "ranks_complete": [rank for rank, piece in pieces.items() if piece.get("state") == "complete"],
        "ranks_writing": [rank for rank, piece in pieces.items() if piece.get("state") != "complete"],
        "ranks_missing": [rank for rank in range(world) if rank not in pieces],
        "ranks_late": [rank for rank, piece in pieces.items() if (piece.get("capture") or {}).get("late")],
        "steps": sorted({step for piece in pieces.values() for step in piece.get("steps") or ()}),
        "levels": sorted({level for piece in pieces.values() for level in piece.get("levels") or ()}),
        "capture": min(captures, key=lambda c: c["first_step"]) if captures else None,
        "rerun": {str(rank): piece["rerun"] for rank, piece in pieces.items() if isinstance(piece.get("rerun"), dict)},
        "began": began,
        "alerts": alerts,
        "first_nonfinite": sorted(first, key=lambda item: (item["step"], item["rank"])),
        "worst": [{"rank": rank, **item} for rank, item in heapq.nsmallest(SHOWN, worst, key=lambda one: _badness(one[1]))],
        "lost": lost,
    }


def _in_order(pieces: Mapping[int, Mapping[str, Any]]) -> tuple[list[Any], dict[str, Any] | None]:
    """All alerts in the order of execution, over all stages of the pipeline, and where it began: the first critical one of all, else the
    first."""
    from msprobe_engine.formats.monitor.alert_order import in_order, merge_equal_alerts, moment_text
    from msprobe_engine.formats.monitor.anomalies import from_alert, pipelines_of

    infos = {rank: piece["rank_info"] for rank, piece in pieces.items() if isinstance(piece.get("rank_info"), Mapping)}
    pipelines = pipelines_of(infos)
    said = [(from_alert(alert, rank, pipelines), alert) for rank, piece in pieces.items() for alert in piece.get("alerts") or ()]
    of = {id(anomaly): alert for anomaly, alert in said if anomaly is not None}
    ordered = in_order(anomaly for anomaly, _ in said if anomaly is not None)
    groups = merge_equal_alerts(ordered)
    first = next((group for group in groups if group.first.critical), groups[0] if groups else None)
    began = None
    if first is not None:
        start = first.first
        began = {
            "step": start.step,
            "ranks": first.ranks,
            "pp_stage": start.pp_stage,
            "name": start.name,
            "rule": start.rule,
            "when": moment_text(first),
        }
    ends: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for anomaly, alert in said:
        if anomaly is None:
            ends.setdefault((str(alert.get("rule")), str(alert.get("name")), str(alert.get("step"))), []).append(alert)
    alerts = [_on_ranks(of[id(group.first)], group.ranks) for group in groups]
    return alerts + [_on_ranks(same[0], sorted({alert["rank"] for alert in same})) for same in ends.values()], began


def _on_ranks(alert: Mapping[str, Any], ranks: Sequence[int]) -> Mapping[str, Any]:
    said = {key: value for key, value in alert.items() if key != "ranks"}
    return said if len(ranks) < 2 else {**said, "ranks": ranges_of(ranks)}


def _badness(item: Mapping[str, Any]) -> float:
    statistics = item.get("statistics") or {}
    count = statistics.get("count") or 1
    return -float((statistics.get("nans") or 0) + (statistics.get("infs") or 0)) / count


def summary(incident: Mapping[str, Any], where: str) -> str:
    """The content of summary.md of the incident directory `where`."""
    lines = [
        f"# Incident {incident['id']}",
        "",
        f"Rule **{incident['rule']}** fired in step **{incident['step']}**, as rank **{incident['announced_by']}** says:",
        _md(incident["message"]),
        "",
        *_began(incident["began"]),
        "## Where it shows first",
        "",
    ]
    first = incident["first_nonfinite"]
    if first:
        lines += ["| rank | step | record | NaN | Inf | elements |", "| --- | --- | --- | --- | --- | --- |"]
        for item in first[:SHOWN]:
            s = item["statistics"]
            lines.append(f"| {item['rank']} | {item['step']} | `{_md(item['name'])}` | {s['nans']} | {s['infs']} | {s['count']} |")
    else:
        lines.append("No NaN or Inf in the recorded steps.")
    lines += _again(incident)
    lines += ["", "## Alerts", ""]
    alerts = incident["alerts"]
    lines += [_alert(alert) for alert in alerts[:SHOWN]] or ["none"]
    if len(alerts) > SHOWN:
        lines.append(f"- and {len(alerts) - SHOWN} more, see incident.json")
    if incident["worst"]:
        lines += ["", "## Worst records", "", "| rank | step | record | NaN | Inf | max | min | norm |", "|" + " --- |" * 8]
        for item in incident["worst"][:10]:
            s = item["statistics"]
            numbers = " | ".join(_n(s[key]) for key in ("nans", "infs", "max", "min", "norm"))
            lines.append(f"| {item['rank']} | {item['step']} | `{_md(item['name'])}` | {numbers} |")
    lines += ["", "## What was written", ""]
    levels = ", ".join(incident["levels"]) or "none (monitor samples only)"
    lines.append(f"- steps of the ring: {in_short(incident['steps'])}; calls at level {levels}")
    capture = incident["capture"]
    if incident["rerun"]:
        lines.append(f"- rerun/: step {incident['step']} once more, everything captured")
    elif capture:
        lines.append(f"- armed: level {capture['level']}, {capture['steps']} step(s) from step {capture['first_step']}")
    complete = incident["ranks_complete"]
    which = f" (rank {in_short(complete)})" if complete else ""
    lines.append(f"- complete: {len(complete)} of {incident['world_size']} ranks{which}")
    for key, text in (
        ("ranks_writing", "began and did not finish (killed? disk full?)"),
        ("ranks_missing", "wrote nothing (dead, hanging, or not told)"),
        ("ranks_late", "heard of it late and capture a later step"),
    ):
        if incident[key]:
            lines.append(f"- ranks {in_short(incident[key])}: {text}")
    if incident["lost"]:
        lines.append("- lost while recording: " + ", ".join(f"{reason} {count}" for reason, count in incident["lost"].items()))
    lines += ["", "## What to run next", "", "```", f"msprobe diagnose {where}", "```", ""]
    return "\n".join(lines)


def _alert(alert: Mapping[str, Any]) -> str:
    where = f"ranks {few_ranges(alert['ranks'])}" if alert.get("ranks") else f"rank {alert['rank']}"
    return f"- {where}, step {alert['step']}, {alert['rule']} ({alert['severity']}): {_md(alert['message'])}"


def _began(began: Mapping[str, Any] | None) -> list[str]:
    if began is None:
        return []
    stage = f", pipeline stage {began['pp_stage']}" if began["pp_stage"] else ""
    where = f"rank {in_short(began['ranks'])}{stage}"
    return [f"Earliest in the order of execution: `{_md(began['name'])}` ({began['rule']}), {where}, {began['when']}.", ""]


VERDICTS = {
    "reproduced": "**reproduced**: it came again at the same place, so it is in the numbers or the code, not a passing fault of a device",
    "transient": "**did not reproduce: transient**: the second run was clean, so suspect the hardware, or a step that draws on chance",
    "differs": "**came again, but not the same**: the step is not deterministic, or the fault is not",
    "clean": "nothing wrong on this rank in either run",
    "interrupted": "the second run did not reach its end",
}


def _again(incident: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for rank, facts in incident["rerun"].items():
        text = VERDICTS.get(str(facts.get("verdict")), str(facts.get("verdict")))
        numbers = f"{facts.get('different')} of {facts.get('compared')} common records differ"
        first = f", first `{facts['differences'][0]}`" if facts.get("differences") else ""
        draws = "" if facts.get("random_equal", True) else "; the runs drew different amounts of random numbers"
        lines.append(f"- rank {rank}: {text} ({numbers}{first}{draws})")
    return ["", "## The same step again", "", *lines] if lines else []


def _md(name: Any) -> str:
    """A name inside a line or table cell of Markdown: no line break, no cell border, no end of code, no tag."""
    text = one_line(str(name))
    for character, shown in (("|", "\u00a6"), ("`", "'"), ("<", "\u2039")):
        text = text.replace(character, shown)
    return text


def _n(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
