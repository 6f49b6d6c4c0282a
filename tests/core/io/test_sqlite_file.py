"""Data bases that nobody should believe: nothing of their schema runs, and reading ends."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io import sqlite_file
from msprobe_engine.core.io.regular_files import OddFileError
from msprobe_engine.core.io.sqlite_file import open_database
from msprobe_engine.formats.monitor.trend_db import TrendDatabase

ENDLESS = "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n) SELECT x AS step, x AS rank FROM n"
HOSTILE = {
    "view": f"CREATE VIEW trend_data AS {ENDLESS}",
    "trigger": f"CREATE TRIGGER t AFTER INSERT ON other BEGIN INSERT INTO other {ENDLESS}; END",
    "virtual table": "CREATE VIRTUAL TABLE trend_data USING fts5(x)",
}


def made(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in ("CREATE TABLE other(a, b)", *statements):
            db.execute(statement)
    return path


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_runs_by_itself_is_refused(tmp_path: Path, kind: str) -> None:
    """For reading and for going on with it."""
    try:
        path = made(tmp_path / "a.trend.db", HOSTILE[kind])
    except sqlite3.OperationalError as error:
        pytest.skip(f"SQLite is built without it: {error}")
    with pytest.raises(ValueError, match=f"is a {kind}"), open_database(path):
        pass
    with pytest.raises(SinkError, match=f"is a {kind}"):
        TrendDatabase(path)


def test_nothing_is_written(tmp_path: Path) -> None:
    path = made(tmp_path / "a.db")
    before = path.read_bytes()
    with pytest.raises(sqlite3.OperationalError, match="readonly"), open_database(path) as db:
        db.execute("INSERT INTO other VALUES (1, 2)")
    assert path.read_bytes() == before


def test_a_run_that_still_writes_is_read(tmp_path: Path) -> None:
    """What is not yet taken in from the file beside it (WAL) is there, too."""
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("CREATE TABLE t(a)")
        writer.execute("INSERT INTO t VALUES (7)")
        with open_database(path) as db:
            assert db.execute("SELECT a FROM t").fetchall() == [(7,)]


@pytest.mark.slow
def test_work_is_bounded_by_the_size_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value of a small file is read within the bound; a query without an end is ended, and it is said why."""
    path = made(
        tmp_path / "a.db",
        "INSERT INTO other WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n LIMIT 200000) SELECT x, x FROM n",
    )
    monkeypatch.setattr(sqlite_file, "MOST_STEPS", 0)
    with open_database(path) as db:
        assert len(db.execute("SELECT a, b FROM other").fetchall()) == 200_000
    with pytest.raises(ValueError, match="reading it takes more than"), open_database(path) as db:
        db.execute(f"SELECT max(step) FROM ({ENDLESS})").fetchall()


@pytest.mark.skipif(not hasattr(sqlite3.Connection, "setlimit"), reason="Python 3.11 has it")
@pytest.mark.slow
def test_values_that_an_expression_makes_are_bounded(tmp_path: Path) -> None:
    """A generated column can ask for a gigabyte in each row."""
    path = made(tmp_path / "a.db", "CREATE TABLE t(a, b AS (hex(zeroblob(a))))", "INSERT INTO t(a) VALUES (400000000)")
    with pytest.raises(sqlite3.Error, match="too big"), open_database(path) as db:
        db.execute("SELECT b FROM t").fetchall()


@pytest.mark.parametrize("ending", ["", "-wal", "-shm", "-journal"])
def test_a_pipe_in_its_place_or_beside_it(tmp_path: Path, ending: str) -> None:
    """SQLite would wait for its other end."""
    path = tmp_path / "a.db"
    if ending:
        made(path)
    os.mkfifo(f"{path}{ending}")
    with pytest.raises(OddFileError, match="named pipe"), open_database(path):
        pass
