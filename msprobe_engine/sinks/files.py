"""Files that survive a killed process and a full disk, for sinks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from msprobe_engine.errors import SinkError

FILE_MODE = 0o640
DIRECTORY_MODE = 0o750


def make_directory(path: Path, what: str) -> None:
    """Create `path` and its parents.

    Raises:
        SinkError: it cannot be created; `what` says what would have been written there.
    """
    try:
        # Path.mkdir gives its mode to the last directory only.
        for directory in reversed((path, *path.parents)):
            directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    except OSError as error:
        raise SinkError(f"{what}: cannot create directory {path}: {error.strerror or error}; name another one or free the place") from error


class AppendFile:
    """A file that grows by whole blocks: a block is there completely or not at all.

    Each block is one write without a buffer of ours, so that what was written is in the hands of the operating system and
    survives a killed process. When a block does not fit (disk full), what was written of it is cut off again. A link in place of
    the file is not followed. A file that was deleted takes nothing more: what goes there would be lost without a word.
    """

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_EXCL if exclusive else 0)
        try:
            self._fd = os.open(path, flags, FILE_MODE)
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            raise SinkError(f"cannot open {path}: {error.strerror or error}; is the directory still there and writable?") from error

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._size

    def append(self, block: bytes) -> None:
        """Add one block.

        Raises:
            SinkError: it could not be written; the file ends with the block before it.
        """
        view = memoryview(block)
        done = 0
        if os.fstat(self._fd).st_nlink == 0:
            raise SinkError(f"cannot write {self.path}: the file was deleted while it was written; what comes now is lost")
        try:
            while done < len(view):
                done += os.write(self._fd, view[done:])
        except OSError as error:
            if done:
                os.ftruncate(self._fd, self._size)
            raise SinkError(f"cannot write {self.path}: {error.strerror or error}; free some space; what is written stays") from error
        self._size += len(block)

    def sync(self) -> None:
        """Everything written is on the disk when this returns."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def replace_file(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Put `data` at `path` so that a reader sees the old file or the new one, never a part.

    Raises:
        SinkError: it cannot be written.
    """
    temporary = ""
    try:
        # The name does not end in .prom, so that a collector of text files does not read it half written.
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise SinkError(f"cannot write {path}: {error.strerror or error}; is the directory there, writable and not full?") from error
