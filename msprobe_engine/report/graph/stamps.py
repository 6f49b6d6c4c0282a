"""The time in the names of the files of one run: two runs that begin in one second must not write the same ones, and what a killed run
has left is taken away by a later one."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.regular_files import FILE_MODE, NEW_FILE, open_regular
from msprobe_engine.report.table_files import unwritable

_STAMP = "%Y%m%d%H%M%S"
_MOST_AT_ONCE = 1000
_LEFT_SECONDS = 3600.0
"""A run whose lock is younger is left alone: some network file systems do not say whether another machine still holds it."""
_LOCK, _SUFFIX = ".graph_", ".lock"


@contextmanager
def reserve(output: Path) -> Iterator[str]:
    """A time of 14 digits that no other run in the directory has, and no file of an earlier one.

    Raises:
        SinkError: the directory cannot be written.
    """
    _sweep(output)
    now = time.time()
    for later in range(_MOST_AT_ONCE):
        stamp = time.strftime(_STAMP, time.localtime(now + later))
        lock = output / f"{_LOCK}{stamp}{_SUFFIX}"
        try:
            held = os.open(lock, NEW_FILE, FILE_MODE)
        except FileExistsError:
            continue
        except OSError as error:
            raise unwritable(lock, error) from error
        try:
            with suppress(OSError):  # file systems without locks: nobody can take it, so nobody takes our files away
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not any(path.name[0] != "." for path in output.glob(f"*_{stamp}.*")):
                yield stamp
                return
        finally:
            with suppress(OSError):
                lock.unlink()
            os.close(held)
    raise SinkError(f"{output}: {_MOST_AT_ONCE} graphs are written here at once; name another output directory")


def waiting_prefix(stamp: str) -> str:
    """What the name of a run's directory for what waits to be written begins with."""
    return f"{_LOCK}{stamp}_"


def _sweep(output: Path) -> None:
    """Remove what runs have left that were killed: the system gives up a lock with its process."""
    for lock in output.glob(f"{_LOCK}{'[0-9]' * 14}{_SUFFIX}"):
        with suppress(OSError):
            held = open_regular(lock, os.O_RDWR)
            try:
                if time.time() - os.fstat(held).st_mtime < _LEFT_SECONDS:
                    continue
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stamp = lock.name[len(_LOCK) : -len(_SUFFIX)]
                for file in output.glob(f".*_{stamp}.*.tmp"):
                    file.unlink(missing_ok=True)
                for directory in output.glob(f"{waiting_prefix(stamp)}*"):
                    shutil.rmtree(directory, ignore_errors=True)
                lock.unlink()
            finally:
                os.close(held)
