"""A file that is written piece by piece under another name, and gets its own when it is whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from msprobe_engine.compare.tables import unwritable
from msprobe_engine.core.io.regular_files import FILE_MODE

_BUFFER = 4 << 20


class WholeFile:
    """Opened for writing, mode 0640; a link in place of the temporary name is not followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.temporary)
        fd = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        self.file = os.fdopen(fd, "wb", buffering=_BUFFER)

    def write(self, data: bytes) -> None:
        """Raises:
        SinkError: the disk is full, or the like.
        """
        try:
            self.file.write(data)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def close(self) -> None:
        """Give the file its name.

        Raises:
            SinkError: it cannot be written.
        """
        try:
            self.file.close()
            os.rename(self.temporary, self.path)
        except OSError as error:
            self.abort()
            raise unwritable(self.path, error) from error

    def abort(self) -> None:
        """Remove what there is."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)
