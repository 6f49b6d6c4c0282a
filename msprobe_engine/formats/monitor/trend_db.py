"""The trend data base: SQLite tables of the existing tool (26.2.0), which its trend viewer opens, and a few of ours beside them.

Theirs::

    monitoring_targets(target_id, target_name, vpp_stage, micro_step)   monitoring_metrics(metric_id, metric_name)
    monitoring_tags(tag_id, tag_name, category, metric_id)              tag_target_mapping(tag_id, target_id)
    global_stats(min_step, max_step, max_rank, <one text column per metric: its statistics>)
    trend_data(rank, step, target_id, metric_id, <statistics>)

The statistics of ``trend_data`` are clamped to +-1e9, infinities are +-(1e9 + 1) and NaN is NULL, as that viewer wants them. Ours keep
what this loses::

    exact_values(rank, step, target_id, metric_id, statistic, value)    text of every number that is NaN, infinite or beyond 1e9
    metric_keys(metric_id, family, phase, detail)                       what a metric is in our words
    row_keys(metric_id, target_id, name, detail, micro_step)            what a target is in our words, for one metric
    scalars(rank, step, name, value)   alerts(rank, step, fields)   run_info(rank, fields)   imports(what, state)
    launches(number, rank, launch, started, restart, first_step)   launch_steps(rank, step, number)   which launch has written a step
"""

from __future__ import annotations

import errno
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.regular_files import explain, open_regular, require_regular
from msprobe_engine.core.io.safe_cells import plain_tag, utf8
from msprobe_engine.core.io.sqlite_file import BESIDE, explain_database, require_plain_tables, set_limits
from msprobe_engine.formats.monitor.series import Floats, Integers, Key

Tags = set[tuple[str, str]]
"""Words by which the viewer of the trend data base groups targets, as the existing tool has them, each with its category:
module, layer, index, function or default."""

LIMIT = 1e9
"""Largest absolute value in ``trend_data``."""
_TABLES = (
    """CREATE TABLE IF NOT EXISTS monitoring_targets (target_id INTEGER PRIMARY KEY AUTOINCREMENT, target_name TEXT NOT NULL,
       vpp_stage INTEGER NOT NULL, micro_step INTEGER NOT NULL DEFAULT 0, UNIQUE(target_name, vpp_stage, micro_step))""",
    "CREATE TABLE IF NOT EXISTS monitoring_metrics (metric_id INTEGER PRIMARY KEY AUTOINCREMENT, metric_name TEXT UNIQUE NOT NULL)",
    """CREATE TABLE IF NOT EXISTS monitoring_tags (tag_id INTEGER PRIMARY KEY AUTOINCREMENT, tag_name TEXT NOT NULL,
       category TEXT NOT NULL, metric_id INTEGER NOT NULL, UNIQUE(tag_name, category, metric_id),
       FOREIGN KEY (metric_id) REFERENCES monitoring_metrics(metric_id))""",
    """CREATE TABLE IF NOT EXISTS tag_target_mapping (tag_id INTEGER NOT NULL, target_id INTEGER NOT NULL, PRIMARY KEY (tag_id, target_id),
       FOREIGN KEY (tag_id) REFERENCES monitoring_tags(tag_id), FOREIGN KEY (target_id) REFERENCES monitoring_targets(target_id))""",
    """CREATE TABLE IF NOT EXISTS global_stats (min_step INTEGER DEFAULT 0, max_step INTEGER DEFAULT 0, max_rank INTEGER DEFAULT 0)""",
    """CREATE TABLE IF NOT EXISTS trend_data (rank INTEGER NOT NULL, step INTEGER NOT NULL, target_id INTEGER NOT NULL,
       metric_id INTEGER NOT NULL, PRIMARY KEY (rank, step, target_id, metric_id),
       FOREIGN KEY (target_id) REFERENCES monitoring_targets(target_id),
       FOREIGN KEY (metric_id) REFERENCES monitoring_metrics(metric_id)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS exact_values (rank INTEGER NOT NULL, step INTEGER NOT NULL, target_id INTEGER NOT NULL,
       metric_id INTEGER NOT NULL, statistic TEXT NOT NULL, value TEXT NOT NULL,
       PRIMARY KEY (rank, step, target_id, metric_id, statistic)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS metric_keys (metric_id INTEGER PRIMARY KEY, family TEXT NOT NULL, phase TEXT NOT NULL,
       detail TEXT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS row_keys (metric_id INTEGER NOT NULL, target_id INTEGER NOT NULL, name TEXT NOT NULL,
       detail TEXT NOT NULL, micro_step INTEGER NOT NULL, PRIMARY KEY (metric_id, target_id)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS scalars (rank INTEGER NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
       PRIMARY KEY (rank, step, name)) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS alerts (rank INTEGER NOT NULL, step INTEGER NOT NULL, fields TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS run_info (rank INTEGER PRIMARY KEY, fields TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS imports (what TEXT PRIMARY KEY, state TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS launches (number INTEGER PRIMARY KEY, rank INTEGER NOT NULL, launch TEXT NOT NULL, started TEXT NOT NULL,
       restart INTEGER NOT NULL, first_step INTEGER NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS launch_steps (rank INTEGER NOT NULL, step INTEGER NOT NULL, number INTEGER NOT NULL,
       PRIMARY KEY (rank, step)) WITHOUT ROWID""",
)


def parameter_tags(name: str) -> Tags:
    """Tags of a parameter or module tensor: every word (module) and every word with the number behind it (layer).

    >>> sorted(parameter_tags("layers.3.mlp.weight"))
    [('layers', 'module'), ('layers.3', 'layer'), ('mlp', 'module'), ('weight', 'module')]
    """
    parts = name.split(".")
    tags: Tags = set()
    for i, part in enumerate(parts):
        if not part.isdigit():
            tags.add((part, "module"))
        elif i and not parts[i - 1].isdigit():
            tags.add((f"{parts[i - 1]}.{part}", "layer"))
    return tags


class TrendDatabase:
    """A data base that is written to, new or gone on with.

    Args:
        path: the file; ``*.trend.db`` is what the viewer looks for.
        tags_of: tags of a target's name.

    Raises:
        SinkError: it cannot be opened or is no data base.
    """

    def __init__(self, path: Path, tags_of: Callable[[str], Tags] = parameter_tags) -> None:
        self.path = path
        self._tags_of = tags_of
        self._file = 0
        try:
            # SQLite would take the mode of the process and follow a link, also one in the place of the files that it keeps beside this one.
            os.close(open_regular(path, os.O_RDWR | os.O_CREAT))
            for ending in BESIDE:
                require_regular(f"{path}{ending}")
            self._db = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
            set_limits(self._db)
            require_plain_tables(self._db)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            with self.transaction():
                for table in _TABLES:
                    self._db.execute(table)
                if not self._db.execute("SELECT 1 FROM global_stats").fetchone():
                    self._db.execute("INSERT INTO global_stats(min_step, max_step, max_rank) VALUES (-1, -1, 0)")
            self._file = os.stat(path).st_ino
        except OSError as error:
            raise SinkError(f"cannot open the data base {error.filename or path}: {explain(error)}") from error
        except SinkError:
            raise  # its first transaction has told what is wrong
        except sqlite3.Error as error:
            raise SinkError(f"cannot open the data base {path}: {explain_database(error, path)}") from error
        except ValueError as error:
            raise SinkError(f"cannot open the data base {path}: {error}; move it away or name another place") from error
        self._forget()

    @property
    def size(self) -> int:
        """Bytes of the data base; the file beside it that is taken in now and then has a few MB more."""
        pages, page = (self._db.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "page_size"))
        return int(pages * page)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing.

        Raises:
            SinkError: it could not be written; nothing of it is in the file.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._there()
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            why = explain_database(error, self.path) if isinstance(error, sqlite3.Error) else ""  # a rollback may shrink a file
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            self._forget()  # ids that were given in it are gone
            if why:
                raise SinkError(
                    f"cannot write {self.path}: {why}; nothing of this write is in it, what was written before stays"
                ) from error
            raise

    def _there(self) -> None:
        """SQLite goes on in a file that was deleted, and all of it would be lost without a word."""
        try:
            found = os.stat(self.path).st_ino
        except OSError:
            found = 0
        if self._file not in (0, found):
            gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            raise SinkError(f"cannot write {self.path}: the file was deleted while it was written; what comes now is lost") from gone

    def place(self, family: str, key: Key) -> tuple[int, int]:
        """Metric and target of a tensor, made when they are not there yet.

        The first phase of a family is the metric with the family's name, others are ``{family}_{phase}``; states of the optimizer are
        ``opt_state_{state}``. Rows with a tag (collectives) have it behind the name of their target, without the rank in it: the same
        call on several ranks is one target.
        """
        if family == "other":
            key = key._replace(detail=plain_tag(key.name, key.detail))
        called = family, key
        found = self._places.get(called)
        if found is None:
            key = key._replace(name=utf8(key.name), detail=utf8(key.detail))
            found = self._places.get((family, key))
        if found is None:
            metric = self._metric(family, key.phase, key.detail if family == "opt_state" else "")
            shown = f"{key.name}/{key.detail}" if family == "other" and key.detail not in ("", "mg_direction") else key.name
            while (target := self._target(shown, key.vpp_stage, max(key.micro_step, 0))) in self._used.get(metric, ()):
                shown += "#2"  # the same words for another tensor of this metric
            self._used.setdefault(metric, set()).add(target)
            self._tag(metric, target, shown)
            self._db.execute("INSERT INTO row_keys VALUES (?, ?, ?, ?, ?)", (metric, target, key.name, key.detail, key.micro_step))
            found = self._places[family, key] = metric, target
        self._places[called] = found
        return found

    def _metric(self, family: str, phase: str, detail: str) -> int:
        key = family, phase, detail
        metric = self._metrics.get(key)
        if metric is None:
            name = identifier(f"{family}_{detail}" if detail else family)
            taken = set(self._metric_names.values())
            if name in taken:
                name = identifier(f"{name}_{phase or 'plain'}")
            while name in taken:
                name += "_"
            metric = int(self._db.execute("INSERT INTO monitoring_metrics(metric_name) VALUES (?)", (name,)).lastrowid or 0)
            self._db.execute("INSERT INTO metric_keys VALUES (?, ?, ?, ?)", (metric, *key))
            if name not in self._columns("global_stats"):
                self._db.execute(f'ALTER TABLE global_stats ADD COLUMN "{name}" TEXT DEFAULT NULL')
            self._metrics[key], self._metric_names[metric] = metric, name
        return metric

    def _target(self, *key: str | int) -> int:
        target = self._targets.get(key)
        if target is None:
            insert = "INSERT INTO monitoring_targets(target_name, vpp_stage, micro_step) VALUES (?, ?, ?)"
            target = self._targets[key] = int(self._db.execute(insert, key).lastrowid or 0)
        return target

    def _tag(self, metric: int, target: int, name: str) -> None:
        for tag, category in sorted(self._tags_of(name)):
            key = tag, category, metric
            number = self._tags.get(key)
            if number is None:
                insert = "INSERT INTO monitoring_tags(tag_name, category, metric_id) VALUES (?, ?, ?)"
                number = self._tags[key] = int(self._db.execute(insert, key).lastrowid or 0)
            self._db.execute("INSERT OR IGNORE INTO tag_target_mapping(tag_id, target_id) VALUES (?, ?)", (number, target))

    def add(self, rank: int, metric: int, steps: Integers | Sequence[int], targets: Sequence[int], values: Mapping[str, Floats]) -> int:
        """Rows of one metric; a row that is there already is replaced.

        Args:
            steps, targets: of every row, [n].
            values: statistic to float64 [n].

        Returns:
            rows written
        """
        steps = [int(s) for s in steps]
        ops = {op: identifier(op) for op in values}
        there = self._columns("trend_data")
        for op in ops.values():
            if op not in there:
                self._db.execute(f'ALTER TABLE trend_data ADD COLUMN "{op}" REAL DEFAULT NULL')
                there.add(op)
        names = "".join(f', "{op}"' for op in ops.values())
        marks = ", ".join("?" * (len(ops) + 4))
        columns = [clamp_values(values[op]) for op in ops]
        count = len(steps)
        rows = zip([rank] * count, steps, targets, [metric] * count, *columns)
        self._db.executemany(f"INSERT OR REPLACE INTO trend_data(rank, step, target_id, metric_id{names}) VALUES ({marks})", rows)
        exact = []
        for op, name in ops.items():
            numbers = values[op]
            with np.errstate(invalid="ignore"):
                beyond = np.flatnonzero(~(np.abs(numbers) <= LIMIT))
            exact += [(rank, steps[i], targets[i], metric, name, repr(float(numbers[i]))) for i in beyond.tolist()]
        if exact:
            self._db.executemany("INSERT OR REPLACE INTO exact_values VALUES (?, ?, ?, ?, ?, ?)", exact)
        if count:
            self._cover(rank, metric, min(steps), max(steps), list(ops.values()))
        return count

    def begin_step(self, rank: int, step: int, launch: str, started: str, restart: bool) -> None:
        """What is added now is of a step of this launch. Numbers that another launch has written of the step go; its alerts stay."""
        known = self._db.execute("SELECT number FROM launches WHERE rank = ? AND launch = ?", (rank, launch)).fetchone()
        if known is None:
            insert = "INSERT INTO launches(rank, launch, started, restart, first_step) VALUES (?, ?, ?, ?, ?)"
            known = (self._db.execute(insert, (rank, launch, started, int(restart), step)).lastrowid,)
        found = self._db.execute("SELECT number FROM launch_steps WHERE rank = ? AND step = ?", (rank, step)).fetchone()
        if found is not None and found != known:
            for table in ("trend_data", "exact_values", "scalars"):
                self._db.execute(f"DELETE FROM {table} WHERE rank = ? AND step = ?", (rank, step))
        self._db.execute("INSERT OR REPLACE INTO launch_steps VALUES (?, ?, ?)", (rank, step, *known))

    def add_scalars(self, rank: int, rows: Iterable[tuple[int, str, float]]) -> None:
        """Numbers of steps: step, name, value."""
        values = ((rank, step, utf8(name), repr(float(value))) for step, name, value in rows)
        self._db.executemany("INSERT OR REPLACE INTO scalars VALUES (?, ?, ?, ?)", values)

    def add_alerts(self, rank: int, alerts: Iterable[tuple[int, str]]) -> None:
        """Alerts: step, fields as JSON."""
        self._db.executemany("INSERT INTO alerts VALUES (?, ?, ?)", ((rank, step, fields) for step, fields in alerts))

    def replace_alerts(self, rank: int, alerts: Iterable[tuple[int, str]]) -> None:
        """As `add_alerts`, in place of those that the rank has."""
        self._db.execute("DELETE FROM alerts WHERE rank = ?", (rank,))
        self.add_alerts(rank, alerts)

    def set_info(self, rank: int, fields: str) -> None:
        """What the run says about itself, as JSON."""
        self._db.execute("INSERT OR REPLACE INTO run_info VALUES (?, ?)", (rank, fields))

    def read_imports(self) -> dict[str, str]:
        """What has been imported: unit to state."""
        return dict(self._db.execute("SELECT what, state FROM imports"))

    def set_imported(self, what: str, state: str) -> None:
        """Note that a unit has been imported."""
        self._db.execute("INSERT OR REPLACE INTO imports VALUES (?, ?)", (what, state))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with suppress(sqlite3.Error):
            self._db.close()

    def _cover(self, rank: int, metric: int, first: int, last: int, ops: list[str]) -> None:
        name = self._metric_names[metric]
        low, high, ranks, text = self._db.execute(f'SELECT min_step, max_step, max_rank, "{name}" FROM global_stats').fetchone()
        known = text.split(",") if text else []
        new = (first if low < 0 else min(low, first), max(high, last), max(ranks, rank), ",".join(dict.fromkeys([*known, *ops])))
        if new != (low, high, ranks, text):
            self._db.execute(f'UPDATE global_stats SET min_step=?, max_step=?, max_rank=?, "{name}"=?', new)

    def _columns(self, table: str) -> set[str]:
        found = self._known.get(table)
        if found is None or table == "global_stats":
            found = self._known[table] = {row[1] for row in self._db.execute(f"PRAGMA table_info({table})")}
        return found

    def _forget(self) -> None:
        """Take the ids from the file again."""
        self._known: dict[str, set[str]] = {}
        self._metrics: dict[tuple[str, str, str], int] = {}
        self._metric_names: dict[int, str] = {}
        self._targets: dict[tuple[str | int, ...], int] = {}
        self._tags: dict[tuple[str, str, int], int] = {}
        self._places: dict[tuple[str, Key], tuple[int, int]] = {}
        self._used: dict[int, set[int]] = {}
        with suppress(sqlite3.Error):
            for metric, *words in self._db.execute("SELECT metric_id, family, phase, detail FROM metric_keys"):
                self._metrics[words[0], words[1], words[2]] = metric
            self._metric_names.update(self._db.execute("SELECT metric_id, metric_name FROM monitoring_metrics"))
            for target, *key in self._db.execute("SELECT target_id, target_name, vpp_stage, micro_step FROM monitoring_targets"):
                self._targets[tuple(key)] = target
            for tag, name, category, metric in self._db.execute("SELECT tag_id, tag_name, category, metric_id FROM monitoring_tags"):
                self._tags[name, category, metric] = tag
            for metric, target, family, place in stored_keys(self._db):
                self._places[family, place] = metric, target
                self._used.setdefault(metric, set()).add(target)


def stored_keys(db: sqlite3.Connection) -> Iterator[tuple[int, int, str, Key]]:
    """Metric, target, family and key of every tensor in a data base of ours."""
    query = """SELECT r.metric_id, r.target_id, m.family, t.vpp_stage, r.name, r.micro_step, m.phase, r.detail FROM row_keys r
               JOIN metric_keys m ON m.metric_id = r.metric_id JOIN monitoring_targets t ON t.target_id = r.target_id"""
    for metric, target, family, *key in db.execute(query):
        yield metric, target, family, Key(*key)


def clamp_values(values: Floats) -> list[float | None]:
    """Numbers as ``trend_data`` holds them: clamped, infinities just beyond, NaN as None."""
    out: list[float | None] = np.where(np.isinf(values), np.copysign(LIMIT + 1, values), np.clip(values, -LIMIT, LIMIT)).tolist()
    for i in np.flatnonzero(np.isnan(values)).tolist():
        out[i] = None
    return out


def identifier(text: str) -> str:
    """A column name of SQLite that needs no quotes."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII)
    return name if name and not name[0].isdigit() else f"_{name}"


def json_text(value: Any) -> str:
    return json.dumps(value, default=str)
