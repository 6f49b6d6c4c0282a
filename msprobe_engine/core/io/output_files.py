"""Files that survive a killed process and a full disk: they grow by whole blocks, or appear whole.

What is opened where, and with which mode: `msprobe_engine.core.io.regular_files`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.regular_files import FILE_MODE, NEW_FILE, AnyPath, explain, make_directories, open_regular, require_regular
from msprobe_engine.core.log import get_logger

_MOST_PARTS = 1024  # of one writev, on every system there is
_log = get_logger()
_LOOKS = 5.0
"""Seconds between two looks whether a file that grows was deleted."""
_LONGEST_NAME = 200  # bytes of a name that its temporary name keeps; 255 are allowed


def make_directory(path: Path, what: str) -> None:
    """Create `path` and its parents.

    Raises:
        SinkError: it cannot be created; `what` says what would have been written there.
    """
    try:
        make_directories(os.fspath(path))
    except OSError as error:
        raise SinkError(f"{what}: cannot create directory {error.filename or path}: {explain(error)}") from error


@contextlib.contextmanager
def guard_writing(path: AnyPath, elsewhere: str = "name another output directory") -> Iterator[None]:
    """Says what cannot be written when the system refuses it, and what to do.

    Args:
        elsewhere: how the user chooses another place.

    Raises:
        SinkError: in place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise SinkError(f"cannot write {os.fsdecode(path)}: {explain(error, elsewhere, path=path)}") from error


def write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    """All of `parts` into `fd`, in one system call unless there are more than a thousand or the kernel takes less."""
    left = [memoryview(p).cast("B") for p in parts if len(p)]
    part = 0
    while part < len(left):
        written = os.writev(fd, left[part : part + _MOST_PARTS])
        while part < len(left) and written >= len(left[part]):
            written -= len(left[part])
            part += 1
        if written:
            left[part] = left[part][written:]


def _temporary_path(path: str | os.PathLike[str]) -> str:
    """Where what goes to `path` is written first.

    Raises:
        OddFileError: something that is no regular file is at `path`.
    """
    require_regular(path)
    head, tail = os.path.split(path)
    kept = os.fsdecode(os.fsencode(tail)[:_LONGEST_NAME])
    return os.path.join(head, f".{kept}.{secrets.token_hex(4)}.tmp")


class WholeFile:
    """A file that is written under another name and gets its own when it is whole: a reader sees the old file or the new one.

    To be used in a ``with`` statement, or ended by `commit` or `abort`. A link, a pipe or the like in its place is refused, neither
    followed nor replaced.

    Args:
        mode: less the umask.
        buffering: as of `open`.

    Attributes:
        temporary: its path until then; it begins with a dot and ends in ``.tmp``.

    Raises:
        OSError: it cannot be made, or something that is no regular file is in its place.
    """

    def __init__(self, path: str | os.PathLike[str], *, mode: int = FILE_MODE, buffering: int = -1) -> None:
        self.path = Path(path)
        self.temporary = _temporary_path(path)
        self.file: BinaryIO = os.fdopen(os.open(self.temporary, NEW_FILE, mode), "wb", buffering)

    def commit(self) -> None:
        """The file is whole: give it its name.

        Raises:
            OSError: that cannot be done; nothing stays of it.
        """
        try:
            self.file.close()
            os.replace(self.temporary, self.path)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)

    def __enter__(self) -> WholeFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


def write_file(path: str | os.PathLike[str], parts: Sequence[bytes | memoryview], mode: int = FILE_MODE) -> None:
    """Put a file at `path` whole or not at all, see `WholeFile`.

    Raises:
        OSError: it cannot be written; what stood there stays.
    """
    temporary = _temporary_path(path)
    fd = os.open(temporary, NEW_FILE, mode)  # no file object: a dump writes some in every step
    try:
        try:
            write_all(fd, parts)
        finally:
            os.close(fd)  # some file systems say only now that they are full
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_plain(path: str | os.PathLike[str], parts: Sequence[bytes | memoryview]) -> None:
    """Write a file in place, for what may be there in part after a kill.

    Raises:
        OSError: as the system says, or something that is no regular file is in its place.
    """
    fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(fd, parts)
    finally:
        os.close(fd)


def write_named(path: str | os.PathLike[str], parts: Sequence[bytes | memoryview]) -> None:
    """`write_file` for a file that the user named in a command: a device or a pipe (``/dev/stdout``) is written to. Never in a training.

    Raises:
        OSError: as the system says.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        with open(path, "wb", buffering=0) as file:
            write_all(file.fileno(), parts)
    else:
        write_file(path, parts)


def write_report(path: Path, text: str) -> Path:
    """`write_named` for a report, with the directories above it.

    Raises:
        SinkError: it cannot be written.
    """
    with guard_writing(path, "name another place"):
        make_directories(os.fspath(path.parent))
        write_named(path, [text.encode("utf-8", "backslashreplace")])
    return path


def replace_file(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """`write_file` for a sink.

    Raises:
        SinkError: it cannot be written; what stood there stays.
    """
    try:
        write_file(path, [data], mode)
    except OSError as error:
        raise SinkError(f"cannot write {path}: {explain(error, path=path)}") from error


class AppendFile:
    """A file that grows by whole blocks: a block is there completely or not at all.

    Each block is one write without a buffer of ours, so that what was written is in the hands of the operating system and
    survives a killed process. When a block does not fit (disk full), what was written of it is cut off again. A file that was
    deleted takes nothing more, as soon as that is seen: it is looked for at the first block, from then on every `_LOOKS` seconds,
    because thousands of ranks would ask a shared file system in each step, and when it is closed.

    Raises:
        SinkError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        self.path = path
        try:
            self._fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_EXCL if exclusive else 0))
            self._size = os.fstat(self._fd).st_size
            self._looked, self._gone = -math.inf, False
        except OSError as error:
            raise SinkError(f"cannot open {path}: {explain(error)}") from error

    @property
    def size(self) -> int:
        return self._size

    def append(self, block: bytes) -> None:
        """Add one block.

        Raises:
            SinkError: it could not be written; the file ends with the block before it.
        """
        view = memoryview(block)
        written = 0
        now = time.monotonic()
        if now >= self._looked + _LOOKS or self._gone:
            self._looked = now
            if os.fstat(self._fd).st_nlink == 0:
                self._gone = True
                gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
                raise SinkError(f"cannot write {self.path}: the file was deleted while it was written; what comes now is lost") from gone
        try:
            while written < len(view):
                written += os.write(self._fd, view[written:])
        except OSError as error:
            if written:
                os.ftruncate(self._fd, self._size)
            raise SinkError(f"cannot write {self.path}: {explain(error, path=self.path)}; what is written stays") from error
        self._size += len(block)

    def sync(self) -> None:
        """Everything written is on the disk when this returns."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; a second call does nothing. That it was deleted since it was last looked for is said, unless its directory is
        gone with it, which the writer tells."""
        if self._fd >= 0:
            if not self._gone and os.fstat(self._fd).st_nlink == 0 and self.path.parent.is_dir():
                _log.warning("%s was deleted while it was written; what it held is lost", self.path)
            fd, self._fd = self._fd, -1
            os.close(fd)
