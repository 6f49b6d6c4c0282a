"""The trend data base as a run: ours with exact numbers, the existing tool's as it has clamped them.

In a data base of the existing tool NaN and what does not exist are both NULL (NaN here). Its infinities, written as +-(1e9 + 1), are
infinities here: no other number is beyond 1e9 there.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.errors import TextError
from msprobe_engine.core.io.damaged_files import DAMAGED
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.sqlite_file import open_database
from msprobe_engine.formats.monitor.reader_json import checked_alert, checked_key, number
from msprobe_engine.formats.monitor.run_layout import Launch, describe_skipped_launch, of_other_runs, stored_launch
from msprobe_engine.formats.monitor.series import Builder, Part, Series, Table, floats, integers, series_of, whole
from msprobe_engine.formats.monitor.trend_db import LIMIT, stored_keys

Problems = Counter[str]
_CHUNK = 50_000
_RANK = re.compile(r"rank(\d{1,7})\.trend\.db", re.ASCII)


class SqliteSource:
    """One file of all ranks, or one file per rank."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.problems: dict[str, Problems] = {}
        self._files: dict[int, list[Path]] = {}
        for path in files:
            found = self._query_file(path, lambda db: _column(db, "SELECT DISTINCT rank FROM trend_data")) or ()
            ranks = [rank for rank in found if isinstance(rank, int)]
            if len(ranks) < len(found):
                self.problems.setdefault(str(path), Counter())["ranks that are no numbers: left out"] = len(found) - len(ranks)
            if not ranks and (match := _RANK.fullmatch(path.name)) is not None:  # killed before its first step, or the disk was full
                ranks = [int(match[1])]
            for rank in ranks:
                self._files.setdefault(rank, []).append(path)

    def ranks(self) -> list[int]:
        return sorted(self._files)

    def info(self, rank: int) -> dict[str, Any]:
        def job(db: sqlite3.Connection) -> Any:
            return parse_json(_column(db, "SELECT fields FROM run_info WHERE rank = ?", rank)[0]) if _has(db, "run_info") else {}

        found = [info for path in self.paths(rank) if isinstance(info := self._query_file(path, job), dict)]
        return found[0] if found else {}

    def paths(self, rank: int) -> list[Path]:
        return self._files.get(rank, [])

    def families(self, rank: int) -> list[str]:
        self.other_runs(rank)  # said by every command that reads this rank

        def job(db: sqlite3.Connection) -> list[str]:
            metrics = set(_column(db, "SELECT DISTINCT metric_id FROM trend_data WHERE rank = ?", rank))
            return [family for metric, family in _families(db).items() if metric in metrics]

        return list(dict.fromkeys(family for path in self.paths(rank) for family in self._query_file(path, job) or ()))

    def read(self, rank: int, family: str) -> dict[str, Table]:
        builder = Builder()

        def job(db: sqlite3.Connection) -> None:
            without = _steps_of_others(db, rank)
            for metric, name in _families(db).items():
                if name == family:
                    _read_metric(db, rank, metric, builder, problems, without)

        for path in self.paths(rank):
            problems: Problems = Counter()
            self._query_file(path, job)
            self._add_problems(path, problems)
        return {family: builder.table()}

    def scalars(self, rank: int) -> dict[str, Series]:
        found: dict[str, dict[int, float]] = {}

        def job(db: sqlite3.Connection) -> None:
            if _has(db, "scalars"):
                wrong, without = 0, _steps_of_others(db, rank)
                for step, name, value in db.execute("SELECT step, name, value FROM scalars WHERE rank = ? ORDER BY step", (rank,)):
                    plain, plain_step = number(value), whole(step)
                    wrong += plain_step is None
                    if plain_step is not None and plain_step not in without:
                        found.setdefault(_text(name), {})[plain_step] = float("nan") if plain is None else plain
                if wrong:
                    problems["number whose step is no whole number"] += wrong

        for path in self.paths(rank):
            problems: Problems = Counter()
            self._query_file(path, job)
            self._add_problems(path, problems)
        return {name: series_of(values) for name, values in found.items()}

    def alerts(self, rank: int) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []

        def job(db: sqlite3.Connection) -> None:
            others = {launch.key for launch in of_other_runs(_launches(db, rank))}
            for fields in _column(db, "SELECT fields FROM alerts WHERE rank = ? ORDER BY rowid", rank) if _has(db, "alerts") else ():
                try:
                    alert = checked_alert(parse_json(_text(fields)), problems)
                except TextError:
                    problems["alert that is no JSON"] += 1
                    continue
                out.extend([] if alert is None or alert.get("launch") in others else [alert])

        for path in self.paths(rank):
            problems: Problems = Counter()
            self._query_file(path, job)
            self._add_problems(path, problems)
        return out

    def other_runs(self, rank: int) -> list[Launch]:
        others: list[Launch] = []
        for path in self.paths(rank):
            launches = self._query_file(path, lambda db: _launches(db, rank)) or []
            skipped = of_other_runs(launches)
            self._add_problems(path, Counter([describe_skipped_launch(other, launches[-1]) for other in skipped]))
            others += skipped
        return others

    def _add_problems(self, path: Path, problems: Problems) -> None:
        """What was left out; a second reading says the same again and does not count."""
        self.problems.setdefault(str(path), Counter()).update(
            {what: n for what, n in problems.items() if what not in self.problems[str(path)]}
        )

    def _query_file(self, path: Path, job: Callable[[sqlite3.Connection], Any]) -> Any:
        """What `job` gives; None when the file cannot be read, which is then a problem of the file."""
        try:
            with open_database(path) as db:
                if db.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                    self.problems.setdefault(str(path), Counter())[
                        "its run has written nothing to it: it began just now, or was killed before its first step"
                    ] = 1
                    return None
                return job(db)
        except (OSError, sqlite3.Error, *DAMAGED) as error:
            what = f"a row names {error}, which is not there" if isinstance(error, KeyError) else str(error)
            self.problems.setdefault(str(path), Counter())[f"cannot be read: {what}"] = 1
            return None


def _launches(db: sqlite3.Connection, rank: int) -> list[Launch]:
    """In the order in which they began."""
    if not (_has(db, "launches") and _has(db, "launch_steps")):
        return []
    query = "SELECT launch, started, restart, first_step FROM launches WHERE rank = ? ORDER BY number"
    return [stored_launch(row) for row in db.execute(query, (rank,))]


def _steps_of_others(db: sqlite3.Connection, rank: int) -> frozenset[int]:
    """Steps whose rows are those of another run, see `msprobe_engine.formats.monitor.run_layout`."""
    others = {launch.key for launch in of_other_runs(_launches(db, rank))}
    if not others:
        return frozenset()
    query = "SELECT s.step, l.launch FROM launch_steps s JOIN launches l ON l.number = s.number WHERE s.rank = ?"
    found = db.execute(query, (rank,))
    return frozenset(at for step, launch in found if _text(launch) in others and (at := whole(step)) is not None)


def _column(db: sqlite3.Connection, query: str, *arguments: int) -> list[Any]:
    return [row[0] for row in db.execute(query, arguments)]


def _has(db: sqlite3.Connection, table: str) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)).fetchone() is not None


def _text(value: object) -> str:
    """SQLite holds anything in any column."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _families(db: sqlite3.Connection) -> dict[int, str]:
    query = (
        "SELECT metric_id, family FROM metric_keys" if _has(db, "metric_keys") else "SELECT metric_id, metric_name FROM monitoring_metrics"
    )
    return {metric: _text(family) for metric, family in db.execute(query) if isinstance(metric, int)}


def _read_metric(
    db: sqlite3.Connection, rank: int, metric: int, builder: Builder, problems: Problems, without: frozenset[int] = frozenset()
) -> None:
    ops = [row[1] for row in db.execute("PRAGMA table_info(trend_data)")][4:]
    query = "SELECT target_id, target_name, vpp_stage, micro_step FROM monitoring_targets"
    keys = {target: checked_key(stage, _text(name), micro) for target, name, stage, micro in db.execute(query)}
    exact: dict[str, dict[tuple[int, int], float]] = {op: {} for op in ops}
    own_format = _has(db, "row_keys")
    if own_format:
        keys.update((target, checked_key(*key)) for m, target, _, key in stored_keys(db) if m == metric)
        query = "SELECT target_id, step, statistic, value FROM exact_values WHERE rank = ? AND metric_id = ?"
        for target, step, op, value in db.execute(query, (rank, metric)):
            if (plain := number(value)) is None:
                problems["exact value that is no number"] += 1
            else:
                exact.setdefault(op, {})[target, step] = plain
    cursor = db.execute("SELECT * FROM trend_data WHERE rank = ? AND metric_id = ?", (rank, metric))
    while rows := cursor.fetchmany(_CHUNK):
        fitting = [row for row in rows if keys[row[2]] is not None and whole(row[1]) is not None]
        if len(fitting) < len(rows):
            problems["row whose step, stage or micro step is no whole number"] += len(rows) - len(fitting)
        if without:
            fitting = [row for row in fitting if row[1] not in without]
        if not fitting:
            continue
        _, steps, targets, _, *columns = zip(*fitting)
        ids = np.fromiter((builder.keys[keys[t]] for t in targets), np.int64, len(fitting))
        values = {}
        for op, column in zip(ops, columns):
            if set(column) == {None} and not exact[op]:
                continue
            numbers, wrong = floats(column)
            if wrong:
                problems[f"{op} that is no number"] += wrong
            known = exact[op]
            for i in np.flatnonzero(np.isnan(numbers) | (np.abs(numbers) >= LIMIT)).tolist() if known else ():
                numbers[i] = known.get((targets[i], steps[i]), numbers[i])
            if not own_format:
                infinite = np.abs(numbers) > LIMIT
                numbers[infinite] = np.copysign(np.inf, numbers[infinite])
            values[op] = numbers
        builder.add(Part(ids, integers(steps)[0], values))
