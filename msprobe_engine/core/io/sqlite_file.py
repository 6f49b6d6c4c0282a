"""The one entry for SQLite data bases that somebody else wrote: read only, plain tables alone, and work in proportion to the file.

A view may make rows without an end, a virtual table may run what it likes, a trigger runs with what is written, and an expression of the
schema may take any memory. What runs beside the training (a sink that goes on with its data base) is guarded alike: `require_plain_tables`.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import quote

from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.regular_files import AnyPath, explain, file_size_limit, require_regular

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


def explain_database(error: sqlite3.Error, path: AnyPath) -> str:
    """What went wrong while a data base was written, and what to do; as `regular_files.explain`, since SQLite keeps the system's error
    to itself. To be asked before the data base is closed: the files beside it tell whether one of them has come to the limit of size."""
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF  # before Python 3.11 the text alone
    text, elsewhere = str(error), "name another place"
    if code == _FULL or text == "database or disk is full":
        return explain(OSError(errno.ENOSPC, text), elsewhere, path=path)
    if code == _IO_ERROR or text == "disk I/O error":
        name = os.fspath(path)
        if (limit := file_size_limit()) >= 0 and max(_size(f"{os.fsdecode(name)}{e}") for e in ("", *BESIDE)) + _SLACK > limit:
            return explain(OSError(errno.EFBIG, text), elsewhere)
        if _is_full(name):
            return explain(OSError(errno.ENOSPC, text), elsewhere, path=path)
        return f"{text}: is the disk still there? or {elsewhere}"
    if "locked" in text:
        return f"{text}: another program writes in it; end that one or {elsewhere}"
    if "readonly" in text or "read-only" in text:
        return explain(OSError(errno.EACCES, text), elsewhere)
    return f"{text}: move the file away or {elsewhere}"


_FULL, _IO_ERROR = 13, 10  # SQLITE_FULL, SQLITE_IOERR
_SLACK = 1 << 16
"""SQLite grows its files by pages (of 64 KiB at most) and by 32 KiB: nearer to a limit it can have been the cause."""


def _is_full(path: AnyPath) -> bool:
    """Could a block of SQLite's no longer be had? It says "disk I/O error" of the file that it maps into memory (``-shm``)."""
    try:
        disk = os.statvfs(os.path.dirname(os.path.abspath(path)))
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _SLACK


def _size(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0
