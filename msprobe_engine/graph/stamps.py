"""The time in the names of the files of one run: two runs that begin in one second must not write the same ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msprobe_engine.compare.tables import unwritable
from msprobe_engine.dump.layout import FILE_MODE
from msprobe_engine.errors import SinkError

_STAMP = "%Y%m%d%H%M%S"
_MOST_AT_ONCE = 1000


@contextmanager
def reserve(output: Path) -> Iterator[str]:
    """A time of 14 digits that no other run in the directory has, and no file of an earlier one.

    Raises:
        SinkError: the directory cannot be written.
    """
    now = time.time()
    for later in range(_MOST_AT_ONCE):
        stamp = time.strftime(_STAMP, time.localtime(now + later))
        lock = output / f".graph_{stamp}.lock"
        try:
            os.close(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE))
        except FileExistsError:
            continue
        except OSError as error:
            raise unwritable(lock, error) from error
        try:
            if not any(path.name[0] != "." for path in output.glob(f"*_{stamp}.*")):
                yield stamp
                return
        finally:
            with suppress(OSError):
                lock.unlink()
    raise SinkError(f"{output}: {_MOST_AT_ONCE} graphs are written here at once; name another output directory")
