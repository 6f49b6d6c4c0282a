"""JSON lines of a monitored run: one object per step, and alerts.

Numbers that JSON does not have are the texts ``NaN``, ``Infinity`` and ``-Infinity``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.formats.monitor.run_layout import Launch, begins_anew, describe_skipped_launch, launch_of, open_file
from msprobe_engine.formats.monitor.series import Builder, Key, Part, Series, Table, floats, series_of, whole

Problems = Counter[str]

_KEY = ("family", "name", "vpp_stage", "micro_step", "phase", "state", "tag", "shape", "dtype", "extra", "digest", "histogram")
"""Fields of a sample that are no statistics."""
_ALERT_INTEGERS, _ALERT_TEXTS = ("rank", "micro_step", "order"), ("kind", "name", "severity", "message")
_LINE = 1 << 30
CUT = "last line is cut"
"""A problem of a file that is still written, or whose writer was killed."""
_RANK = re.compile(r"rank(\d{1,7})\.jsonl", re.ASCII)


def lines_of(path: Path, problems: Problems) -> Iterator[dict[str, Any]]:
    """Objects of a file, one per line; what is none is counted. A last line without an end is left out: its writer was killed."""
    try:
        with open_file(path) as file:
            while line := file.readline(_LINE):
                if not line.endswith(b"\n"):
                    problems[CUT if len(line) < _LINE else "line too long"] += 1
                    return
                try:
                    value = parse_json(line)
                except ValueError:
                    problems["line that is no JSON"] += 1
                    continue
                if isinstance(value, dict):
                    yield value
                else:
                    problems["line that is no JSON object"] += 1
    except OSError as error:
        problems[f"cannot be read: {error.strerror or os.fspath(path)}"] += 1


def number(value: Any) -> float | None:
    """A number, also one that JSON does not have; None when `value` is none."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def read_alerts(path: Path, problems: Problems) -> list[dict[str, Any]]:
    """Alerts of a file, their `value` as a float."""
    return [alert for line in lines_of(path, problems) if (alert := checked_alert(line, problems)) is not None]


def checked_alert(alert: Any, problems: Problems) -> dict[str, Any] | None:
    """An alert whose fields have the types of `rules.base.Alert`, its `value` as a float; what is none is counted."""
    step = whole(alert.get("step")) if isinstance(alert, dict) else None
    if not isinstance(alert, dict) or not isinstance(alert.get("rule"), str) or step is None:
        problems["line that is no alert"] += 1
        return None
    made = {**alert, "step": step}
    for field in _ALERT_INTEGERS:
        if made.get(field) is None:
            made.pop(field, None)
            continue
        made[field] = whole(alert[field])
        if made[field] is None:
            problems[f"alert whose {field} is no whole number"] += 1
            return None
    for field in _ALERT_TEXTS:
        if not isinstance(alert.get(field, ""), str):
            problems[f"alert whose {field} is no text"] += 1
            return None
    if not isinstance(alert.get("extra") or {}, dict):
        problems["alert whose extra is no object"] += 1
        return None
    value = number(alert.get("value"))
    return {**made, "value": float("nan") if value is None else value}


def checked_key(vpp_stage: Any, name: Any, micro_step: Any = -1, phase: Any = "", detail: Any = "") -> Key | None:
    """The key of a sample, None when one of its parts has another type."""
    stage, micro = whole(vpp_stage), whole(micro_step)
    if stage is None or micro is None or not isinstance(name, str) or not isinstance(phase, str) or not isinstance(detail, str):
        return None
    return Key(stage, name, micro, phase, detail)


class JsonLinesSource:
    """Files with one object per step; every file is read once."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.problems: dict[str, Problems] = {}
        self._files: dict[int, Path] = {}
        for path in files:
            match = _RANK.fullmatch(path.name)
            rank = int(match[1]) if match else next((whole(line.get("rank")) or 0 for line in lines_of(path, Counter())), None)
            if rank is not None:
                self._files[rank] = path
        self._read: dict[int, _Rank] = {}

    def ranks(self) -> list[int]:
        return sorted(self._files)

    def info(self, rank: int) -> dict[str, Any]:
        return self._rank(rank).info

    def paths(self, rank: int) -> list[Path]:
        return [self._files[rank]] if rank in self._files else []

    def families(self, rank: int) -> list[str]:
        return list(self._rank(rank).tables)

    def read(self, rank: int, family: str) -> dict[str, Table]:
        table = self._rank(rank).tables.get(family)
        return {} if table is None else {family: table}

    def scalars(self, rank: int) -> dict[str, Series]:
        return self._rank(rank).scalars

    def alerts(self, rank: int) -> list[dict[str, Any]]:
        return self._rank(rank).alerts

    def other_runs(self, rank: int) -> list[Launch]:
        return self._rank(rank).others

    def _rank(self, rank: int) -> _Rank:
        if rank not in self._read:
            problems: Problems = Counter()
            self._read[rank] = _Rank(self._files[rank], problems) if rank in self._files else _Rank(None, problems)
            if problems:
                self.problems[str(self._files[rank])] = problems
        return self._read[rank]


class _Rank:
    """What the file of one rank says."""

    def __init__(self, path: Path | None, problems: Problems) -> None:
        self.info: dict[str, Any] = {}
        self.alerts: list[dict[str, Any]] = []
        self.others: list[Launch] = []
        """Launches of other runs, see `msprobe_engine.formats.monitor.run_layout`."""
        launches, begun = [Launch("")], False
        builders: dict[str, Builder] = {}
        numbers: dict[str, dict[int, float]] = {}
        for line in lines_of(path, problems) if path is not None else ():
            if isinstance(line.get("run"), dict):
                self.info = line["run"]
                if (launch := launch_of(self.info)).key != launches[-1].key:
                    launches.append(launch)
                    begun = False
                continue
            step = whole(line.get("step"))
            if step is None:
                problems["line without a step"] += 1
                continue
            if not begun:  # the run line stands before its first step
                begun = True
                launches[-1] = launches[-1]._replace(first=step)
                if begins_anew(launches[-1], launches[:-1]):
                    self.others += [launch for launch in launches[:-1] if launch.first is not None]
                    launches = launches[-1:]
                    builders, numbers, self.alerts = {}, {}, []
            _scalars(line.get("scalars"), step, numbers, problems)
            _samples(line.get("samples"), step, builders, problems)
            alerts = line.get("alerts") or []
            if not isinstance(alerts, list):
                problems["alerts that are no list"] += 1
                continue
            for alert in alerts:
                made = checked_alert({"step": step, **alert} if isinstance(alert, dict) else alert, problems)
                self.alerts += [] if made is None else [made]
        for other in self.others:
            problems[describe_skipped_launch(other, launches[-1])] += 1
        self.tables: dict[str, Table] = {family: builder.table() for family, builder in builders.items()}
        self.scalars = {name: series_of(values) for name, values in numbers.items()}


def _scalars(scalars: Any, step: int, numbers: dict[str, dict[int, float]], problems: Problems) -> None:
    if not isinstance(scalars, dict):
        if scalars is not None:
            problems["scalars that are no object"] += 1
        return
    for name, value in scalars.items():
        if (plain := number(value)) is None:
            problems["scalar that is no number"] += 1
        else:
            numbers.setdefault(name, {})[step] = plain


def _samples(samples: Any, step: int, builders: dict[str, Builder], problems: Problems) -> None:
    if not isinstance(samples, list):
        if samples is not None:
            problems["samples that are no list"] += 1
        return
    ids: dict[str, list[int]] = {}
    columns: dict[str, dict[str, list[Any]]] = {}
    for sample in samples:
        try:
            family = sample["family"]
            key = checked_key(
                sample.get("vpp_stage", 0),
                sample["name"],
                sample.get("micro_step", -1),
                sample.get("phase", ""),
                sample.get("state", sample.get("tag", "")),
            )
        except (TypeError, KeyError, AttributeError):
            key = None
        if key is None or not isinstance(family, str):
            problems["sample without family, name or with a wrong stage"] += 1
            continue
        builder = builders.setdefault(family, Builder(family))
        row = builder.keys[key]
        if isinstance(shape := sample.get("shape"), list):
            builder.add_kind(key, str(shape), str(sample.get("dtype", "")))
        rows_of_family = ids.setdefault(family, [])
        rows_of_family.append(row)
        ops = columns.setdefault(family, {})
        for op, value in sample.items():
            if op not in _KEY:
                column = ops.setdefault(op, [])
                column += [None] * (len(rows_of_family) - 1 - len(column))
                column.append(value)
    for family, rows in ids.items():
        values = {}
        for op, column in columns[family].items():
            column += [None] * (len(rows) - len(column))
            values[op], wrong = floats(column)
            if wrong:
                problems[f"{op} that is no number"] += wrong
        builders[family].add(Part(np.array(rows, np.int64), np.full(len(rows), step, np.int64), values))
