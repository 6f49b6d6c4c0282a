"""Alerts of all ranks of a run in one form: from ``alerts.jsonl`` and the other files of the monitor, or from the existing tool's
``anomaly_detected/rank{R}/anomaly.json``."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.core.text.ranges import ranks_text
from msprobe_engine.formats.monitor.completeness import missing_parts, other_runs, remarks, still_running
from msprobe_engine.formats.monitor.reader import Run, open_run
from msprobe_engine.formats.monitor.reader_csv import ALERTS_FILE
from msprobe_engine.formats.monitor.run_layout import open_file, scan
from msprobe_engine.formats.monitor.series import whole

FILE, DIRECTORY = "anomaly.json", "anomaly_detected"
MOST_BYTES = 1 << 30
_RANK = re.compile(r"rank(\d{1,7})", re.ASCII)
_TAG = re.compile(r"(?:(\d+):)?(.*?)(?::(\d+))?/rank\d+/(.*)", re.DOTALL)
_OLD_OP = re.compile(r"anomaly signal in \('.*', '(\w+)'\)", re.DOTALL)
_OLD_RULE = re.compile(r"Rule (\w+) reports")
_LOST = 1 << 40


@dataclass(frozen=True)
class Anomaly:
    """One alert.

    Attributes:
        word: what kind of tensor, in the words of the existing tool's tags (``actv``, ``post_grad``, ``param_origin``, ...), ``loss`` or
            ``step`` for numbers of a step, ``collective``.
        phase: of a gradient, ``""`` when unknown.
        micro_step: -1 when unknown.
        call: order within the step on its rank, -1 when unknown.
        op: statistic, ``""`` when unknown.
        critical: it is not a mere warning.
        after_backward: it is of a call that follows the last backward call of its rank in the step.
        mates: ranks of its pipeline.
        next: what to do, in words; ``""``: nobody said.
        more: further ones of its rule and step that have no alert of their own.
        differing: where `rank` speaks for several (replicas that are not equal): those of a minority, or all where no value has a majority.
    """

    rank: int
    step: int
    name: str
    word: str
    phase: str = ""
    micro_step: int = -1
    pp_stage: int = 0
    vpp_stage: int = 0
    call: int = -1
    op: str = ""
    rule: str = ""
    critical: bool = False
    value: float = math.nan
    message: str = ""
    after_backward: bool = False
    mates: tuple[int, ...] = ()
    meaning: str = ""
    next: str = ""
    differing: tuple[int, ...] = ()
    more: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.differing or (self.rank,)

    @property
    def tag(self) -> str:
        """The existing tool's name of it."""
        micro = f":{self.micro_step}" if self.micro_step >= 0 else ""
        return f"{self.vpp_stage}:{self.name}{micro}/rank{self.rank}/{self.word}"


@dataclass
class Found:
    """What `load` found.

    Attributes:
        ranks: ranks that said anything, an empty list of alerts included.
        problems: what could not be read, to how often.
        left_out: see `Run.left_out`.
        missing: what the run has not written or what is not here, see `msprobe_engine.formats.monitor.completeness`.
        notes: that the run still goes on, and what it remarks of itself, see `msprobe_engine.formats.monitor.completeness`.
        running: it does.
        looked_at: what was read, and what says that rules looked at the run, in sentences.
    """

    anomalies: list[Anomaly] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    running: bool = False
    looked_at: list[str] = field(default_factory=list)


def load(path: Path) -> Found:
    """All alerts of a run. What the monitor wrote itself says more than ``anomaly.json``, so that is read where both are.

    Args:
        path: as `msprobe_engine.formats.monitor.reader.open_run` takes it, or a directory that holds ``anomaly_detected`` or is it.

    Raises:
        UsageError: there is neither.
    """
    with collection_paused():
        return _load(path)


def _load(path: Path) -> Found:
    old = _load_files(path)
    try:
        run = open_run(path)
    except UsageError:
        if old is None:
            raise
        return old
    found = Found(ranks=list(run.ranks))
    pipelines = _pipelines(run)
    for rank in run.ranks:
        for alert in run.alerts(rank):
            if (one := from_alert(alert, rank, pipelines)) is not None:
                found.anomalies.append(one)
    running = still_running(run)
    found.missing, found.running, found.notes = missing_parts(run), bool(running), [*running, *remarks(run), *other_runs(run)]
    found.problems.update(run.problems)
    found.left_out = run.left_out
    found.looked_at = _looked_at(run)
    if found.anomalies or old is None:
        return found
    old.missing, old.running, old.notes = found.missing, found.running, found.notes
    return old


def _looked_at(run: Run) -> list[str]:
    """Which ranks have a file of alerts, and which rules say that they looked."""
    said = []
    if run.format == "csv":
        having = [rank for rank in run.ranks if any(os.path.lexists(path / ALERTS_FILE) for path in run.paths(rank))]
        there = set(having)
        without = [rank for rank in run.ranks if rank not in there]
        if having:
            said.append(f"{ALERTS_FILE} of {ranks_text(having)} was read")
        if without:
            said.append(f"{ranks_text(without)} {'has' if len(without) == 1 else 'have'} no {ALERTS_FILE}: it is made with the first alert")
    else:
        said.append(f"the steps of {ranks_text(run.ranks)} were read, which hold their alerts")
    rules = sorted({str(rule) for rank in run.ranks if isinstance(names := run.info(rank).get("rules"), list) for rule in names})
    said.append(f"rules: {', '.join(rules)}" if rules else "the run does not say which rules looked at it")
    return said


def _pipelines(run: Run) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Rank to its stage and the ranks of its pipeline, as far as run.json says."""
    return pipelines_of({rank: info for rank in run.ranks if isinstance(info := run.info(rank).get("rank_info"), Mapping)})


def pipelines_of(infos: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Rank to its stage and the ranks of its pipeline.

    Args:
        infos: ``pp``, ``tp``, ``dp``, ... of each rank. Who has no ``pp`` is a pipeline alone: ranks of DDP are copies of each other.
    """
    together: dict[str, list[int]] = {}
    lines = {rank: repr([whole(info.get(axis)) for axis in ("dp", "tp", "cp", "ep")]) for rank, info in infos.items()}
    for rank, line in lines.items():
        together.setdefault(line, []).append(rank)
    pipelines = {line: tuple(ranks) for line, ranks in together.items()}
    out: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank, info in infos.items():
        stage = whole(info.get("pp"))
        out[rank] = (0, (rank,)) if stage is None else (stage, pipelines[lines[rank]])
    return out


def from_alert(alert: Mapping[str, Any], rank: int, pipelines: Mapping[int, tuple[int, tuple[int, ...]]]) -> Anomaly | None:
    """An alert as it is written (the fields of `Alert`) in one form with all others; None for the end of a lasting alert."""
    extra = alert.get("extra")
    extra = extra if isinstance(extra, Mapping) else {}
    if extra.get("over"):
        return None
    rank = _number(alert.get("rank"), rank)
    given = extra.get("minority")
    differing = tuple(sorted(whole_rank for one in given if (whole_rank := whole(one)) is not None)) if isinstance(given, list) else ()
    if differing and rank not in differing:
        rank = differing[0]
    stage, mates = pipelines.get(rank, (0, (rank,)))
    phase = str(extra.get("phase", ""))
    family = str(extra.get("family") or _FAMILY.get(str(alert.get("kind")), alert.get("kind", "")))
    return Anomaly(
        rank=rank,
        step=_number(alert.get("step"), 0),
        name=str(alert.get("name", "")),
        word=word_of(family, phase),
        phase=phase,
        micro_step=_number(alert.get("micro_step"), -1),
        pp_stage=stage,
        vpp_stage=_number(extra.get("vpp_stage"), 0),
        call=_number(alert.get("order"), -1),
        op=str(extra.get("op", extra.get("column", ""))),
        rule=str(alert.get("rule", "")),
        critical=alert.get("severity") == "critical",
        value=float(alert.get("value", math.nan)),
        message=str(alert.get("message", "")),
        after_backward=extra.get("after_backward") is True,
        mates=mates,
        meaning=str(extra.get("meaning", "")),
        next=str(extra.get("next", "")),
        differing=differing,
        more=max(_number(extra.get("more"), 0), 0),
    )


_FAMILY = {
    "activation": "actv", "activation_grad": "actv_grad", "grad": "grad_reduced", "param": "param_origin", "opt_state": "opt_state",
    "update": "update", "feature": "linear_hook", "collective": "collective", "loss": "loss", "step": "step",
}  # fmt: skip
"""For alerts that do not say their family: the kind's usual one."""


def word_of(family: str, phase: str) -> str:
    """The existing tool's word for a family of the monitor."""
    if family == "grad_unreduced":
        return "acc_grad" if phase == "accumulated" else "pre_grad"
    if family == "grad_reduced":
        return "post_grad" if phase in ("", "reduced") else f"{phase}_grad"
    return family


# ---- anomaly.json ----


def _load_files(path: Path) -> Found | None:
    """``anomaly.json`` of all ranks, None when there is not even a directory of them."""
    for root in (path, path / DIRECTORY):
        if not root.is_dir():
            continue
        files = [
            (int(match[1]), Path(entry.path) / FILE)
            for entry in scan(root)
            if (match := _RANK.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
        ]
        files = [(rank, file) for rank, file in files if os.path.lexists(file)]
        if files or root.name == DIRECTORY:
            found = Found(ranks=sorted(rank for rank, _ in files))
            for rank, file in sorted(files):
                _load_file(file, rank, found)
            found.left_out = found.problems.total()
            return found
    return None


def _load_file(path: Path, rank: int, found: Found) -> None:
    try:
        with open_file(path) as file:
            data = file.read(MOST_BYTES + 1)
        records = parse_json(data) if len(data) <= MOST_BYTES else None
    except (OSError, ValueError):
        records = None
    if not isinstance(records, dict):
        found.problems[f"{path}: no anomalies that can be read"] += 1
        return
    for record in records.values():
        if isinstance(record, dict) and isinstance(record.get("tag_name"), str) and whole(record.get("step")) is not None:
            found.anomalies.append(_from_record(record, rank))
        else:
            found.problems[f"{path}: record that is no anomaly"] += 1


def _from_record(record: Mapping[str, Any], rank: int) -> Anomaly:
    tag = record["tag_name"]
    match = _TAG.fullmatch(tag)
    vpp, name, micro, word = match.groups() if match else (None, tag, None, "")
    message = str(record.get("message", ""))
    op, rule = _OLD_OP.search(message), _OLD_RULE.search(message)
    rule_name = str(record.get("rule") or (rule[1] if rule else ""))
    value = record.get("value")
    per_micro = word in ("actv", "actv_grad", "pre_grad", "acc_grad")
    mates = record.get("group_mates")
    return Anomaly(
        rank=_number(record.get("rank"), rank),
        step=_number(record["step"], 0),
        name=name,
        word=word,
        phase=word.removesuffix("_grad") if word in ("unscaled_grad", "clipped_grad") else "",
        micro_step=int(micro[:9]) if micro and per_micro else _number(record.get("micro_step"), -1) if word == "actv" else -1,
        pp_stage=_number(record.get("pp_stage"), 0),
        vpp_stage=int(vpp[:9]) if vpp else _number(record.get("vpp_stage"), 0),
        call=_number(record.get("call_id"), -1),
        op=str(record.get("op") or (op[1] if op else "")),
        rule=rule_name,
        critical=record.get("severity") == "critical" if "severity" in record else rule_name == "AnomalyNan",
        value=_float(value),
        message=message,
        mates=tuple(m for m in mates if isinstance(m, int)) if isinstance(mates, list) else (),
    )


def _number(value: Any, default: int) -> int:
    found = whole(value)
    return default if found is None or abs(found) > _LOST else found


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
