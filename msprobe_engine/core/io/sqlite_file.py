"""The one entry for SQLite data bases that somebody else wrote: read only, plain tables alone, and work in proportion to the file.

A view may make rows without an end, a virtual table may run what it likes, a trigger runs with what is written, and an expression of the
schema may take any memory. What runs beside the training (a sink that goes on with its data base) is guarded alike: `require_plain_tables`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import quote

from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.regular_files import AnyPath, require_regular

BESIDE = ("-journal", "-wal", "-shm")
"""Endings of the files that SQLite keeps beside a data base, and opens with it."""
MOST_STEPS, STEPS_PER_BYTE = 50_000_000, 64
"""Steps of SQLite's machine for one connection, and more for each byte of the file: a row of 20 bytes takes about 30 to read."""
_PACE = 100_000
_LIMITS = (
    ("SQLITE_LIMIT_LENGTH", 1 << 26),
    ("SQLITE_LIMIT_SQL_LENGTH", 1 << 20),
    ("SQLITE_LIMIT_EXPR_DEPTH", 100),
    ("SQLITE_LIMIT_ATTACHED", 0),
    ("SQLITE_LIMIT_LIKE_PATTERN_LENGTH", 100),
    ("SQLITE_LIMIT_TRIGGER_DEPTH", 1),
)


@contextmanager
def open_database(path: AnyPath) -> Iterator[sqlite3.Connection]:
    """A data base for reading; what a run that still writes has not taken in yet is read, too. A link is not followed.

    Raises:
        OSError: it is not there, or is no regular file.
        ValueError: it holds more than plain tables, or reading it would not end.
        sqlite3.Error: it is damaged or no data base; from the caller's queries, too.
    """
    with open_input(path, follow=False) as file:
        size = os.fstat(file.fileno()).st_size
    name = os.path.abspath(os.fsdecode(path))
    for ending in BESIDE:
        require_regular(name + ending)
    left = (MOST_STEPS + STEPS_PER_BYTE * (size + _size(f"{name}-wal"))) // _PACE

    def count() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    with closing(sqlite3.connect(f"file:{quote(os.fsencode(name))}?mode=ro", uri=True, timeout=10.0)) as db:
        set_limits(db)
        db.set_progress_handler(count, _PACE)
        try:
            require_plain_tables(db)
            yield db
        except sqlite3.OperationalError:
            if left >= 0:
                raise
            raise ValueError(f"reading it takes more than its {size} bytes can need: it is damaged, or made to keep readers busy") from None


def set_limits(db: sqlite3.Connection) -> None:
    """Bound what the schema and the values of a data base can ask for; before Python 3.11 SQLite's own limits hold."""
    if hasattr(db, "setlimit"):
        for what, most in _LIMITS:
            db.setlimit(getattr(sqlite3, what), most)
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")


def require_plain_tables(db: sqlite3.Connection) -> None:
    """Nothing in the schema runs when tables are read or written.

    Raises:
        ValueError: there is a view, a trigger or a virtual table.
    """
    unusual = "type NOT IN ('table', 'index') OR (type = 'table' AND sql NOT LIKE 'CREATE TABLE %')"
    if (odd := db.execute(f"SELECT type, name FROM sqlite_master WHERE {unusual}").fetchone()) is not None:
        kind = odd[0] if odd[0] in ("view", "trigger") else "virtual table"
        raise ValueError(f"{str(odd[1])[:120]!r} is a {kind}, and such a data base has plain tables alone")


def _size(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0
