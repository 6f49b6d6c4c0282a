"""Why a run has lost something, in one word that its files keep and readers turn into a sentence."""

from __future__ import annotations

import errno
import re
import sqlite3
from collections.abc import Mapping

from msprobe_engine.core.text.sentences import Sentence

DELETED, SLOW, OTHER = "deleted", "slow", "error"
"""Causes besides the names of the system's errors."""
CAUSES: Mapping[str, str] = {
    "ENOSPC": Sentence("the disk was full"),
    "EDQUOT": Sentence("the disk quota was used up"),
    "EFBIG": Sentence("a file had come to the limit of its size"),
    "EMFILE": Sentence("the process had too many open files"),
    "ENFILE": Sentence("the machine had too many open files"),
    "EROFS": Sentence("the file system was read-only"),
    "EACCES": Sentence("it had no permission to write there"),
    "EPERM": Sentence("it had no permission to write there"),
    "ENOENT": Sentence("the files were deleted or moved away while the run wrote them"),
    DELETED: Sentence("the files were deleted or moved away while the run wrote them"),
    SLOW: Sentence("the file system took longer than the run waits for it"),
    OTHER: Sentence("an error that the log of the run names"),
}
_CODES = re.compile(r"[A-Za-z0-9]{1,24}(\+[A-Za-z0-9]{1,24}){0,3}")
_MOST = 4
_SQLITE_FULL = (13, "database or disk is full")


def cause_of(error: BaseException) -> str:
    """The name of the system's error that is behind `error`, or `OTHER`."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and (name := errno.errorcode.get(at.errno or 0)):
            return name
        if isinstance(at, sqlite3.Error) and (getattr(at, "sqlite_errorcode", None) == _SQLITE_FULL[0] or str(at) == _SQLITE_FULL[1]):
            return errno.errorcode[errno.ENOSPC]
        at = at.__cause__
    return OTHER


def both(earlier: str, later: str) -> str:
    """Two causes, each of which may be several already, as one word."""
    return "+".join(list(dict.fromkeys(code for one in (earlier, later) for code in one.split("+") if code))[:_MOST])


def parse_causes(value: object) -> str:
    """What a file gives as causes; empty when it can be none."""
    return value if isinstance(value, str) and _CODES.fullmatch(value) else ""


def sentences(causes: str) -> list[str]:
    """Causes in words; a system's error that is not in `CAUSES` stays a name."""
    return list(dict.fromkeys(CAUSES.get(code, code) for code in causes.split("+") if code))
