"""A zip that many processes add entries to, each in its turn, and that is readable after any of them was killed.

A zip ends with its directory. New entries take the directory's place and a longer one follows; all of it is made in memory and handed to
the system in one call, under an exclusive lock of the file. Where that call fails (disk full), the old directory is put back. A process
that is killed inside the call leaves a zip without a directory: `open_archive` finds the entries by the headers in front of them.

The lock is `flock` on the zip itself, as the existing tool takes it. Some file systems have no locks (mounts of Lustre and NFS): `Refused`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core.errors import ArchiveError, SinkError
from msprobe_engine.core.io.archives import LOCAL_HEADER, MEMBER, MOST_ENTRIES, read_directory
from msprobe_engine.core.io.claims import NO_LOCKS
from msprobe_engine.core.io.regular_files import explain, open_regular
from msprobe_engine.core.log import one_line

ENTRY_MODE = 0o600
"""Of an entry, for whoever extracts it; as the existing tool has it."""
PATIENCE = 120.0
"""Seconds to wait for another process' turn."""
MOST_BYTES = 10 * 2**30
"""Of all entries together, unpacked; the existing tool's limit."""
MOST_ENTRY_BYTES = 2**30
"""Of one entry; the existing tool's limit."""
MOST_OF_HEAD = 1 << 24
"""Bytes of an entry that says who wrote the pack: ranks read it while they train."""
_SIZES_FOLLOW = 0x8
_UTF8 = 0x800


class Refused(Exception):
    """The file system has no locks."""


@contextlib.contextmanager
def lock_file(path: Path, lock: Path | None = None) -> Iterator[int]:
    """The descriptor of the file at `path` (made when there is none), which nobody else writes meanwhile.

    Args:
        lock: a file elsewhere that is locked in its place.

    Raises:
        Refused: the file system has no locks, and `lock` is None.
        SinkError: the file cannot be opened, or others keep it for `PATIENCE` seconds.
    """
    fd = _open(path, path)
    try:
        guard = fd if lock is None else _open(lock, path)
        try:
            _acquire_lock(guard, path)
            yield fd
        finally:
            if guard != fd:
                os.close(guard)
    finally:
        os.close(fd)  # and with it the lock


def lock_of_node(path: Path) -> Path:
    """A file on this node's own disk that stands for `path`."""
    name = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"msprobe_{os.getuid()}_{name}.lock"


def _open(path: Path, pack: Path) -> int:
    try:
        return open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise SinkError(f"cannot write the pack {one_line(str(pack))}: {path}: {explain(error, 'name another path')}") from error


def _acquire_lock(fd: int, path: Path) -> None:
    until, pause = time.monotonic() + PATIENCE, 0.002
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in NO_LOCKS:
                raise Refused(error.strerror or str(error)) from error
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                raise SinkError(f"cannot lock the pack {one_line(str(path))}: {error.strerror or error}; name another path") from error
        if time.monotonic() > until:
            raise SinkError(
                f"the pack {one_line(str(path))} has been locked by another process for {PATIENCE:g} s; end that one, or name another path"
            )
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


class Grown:
    """The first `start` bytes of a file and, behind them, bytes in memory: a file object for `zipfile`, which writes only the latter."""

    def __init__(self, fd: int, start: int) -> None:
        self._fd, self.start, self._at = fd, start, start
        self.memory = io.BytesIO()

    def seekable(self) -> bool:
        return True

    def flush(self) -> None:
        """There is nothing to flush."""

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        end = self.start + self.memory.getbuffer().nbytes
        self._at = max(0, offset + (0, self._at, end)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self.start + self.memory.getbuffer().nbytes
        size = end - self._at if size < 0 else size
        head = os.pread(self._fd, min(size, self.start - self._at), self._at) if self._at < self.start else b""
        self._at += len(head)
        if self._at < self.start:
            return head
        self.memory.seek(self._at - self.start)
        tail = self.memory.read(size - len(head))
        self._at += len(tail)
        return head + tail

    def write(self, data: Any) -> int:
        self.memory.seek(self._at - self.start)
        done = self.memory.write(data)
        self._at += done
        return done


class Opened(NamedTuple):
    """A zip for reading.

    Attributes:
        entries: all of them, unchecked.
        end: where its last entry ends, and its directory begins.
        damaged: its directory was lost; these are the entries in front of `end` that are whole.
    """

    file: Any
    entries: list[zipfile.ZipInfo]
    end: int
    damaged: bool


def open_archive(fd: int) -> Opened:
    """The zip behind `fd`, which stays open as long as the caller reads.

    Raises:
        ArchiveError: this is no zip, nor what is left of one.
    """
    size = os.fstat(fd).st_size
    whole: Any = Grown(fd, size)
    try:
        return Opened(whole, *read_directory(whole), damaged=False)
    except ArchiveError:
        members, end = _entries(fd, size)
        if not members:
            raise
        return Opened(whole, members, end, damaged=True)


def _entries(fd: int, size: int) -> tuple[list[zipfile.ZipInfo], int]:
    """The entries that lie one behind the other from the start of the file, and where the last one ends."""
    members: dict[str, zipfile.ZipInfo] = {}
    position = 0
    while len(members) < MOST_ENTRIES:
        head = os.pread(fd, LOCAL_HEADER.size, position)
        if len(head) < LOCAL_HEADER.size:
            break
        signature, version, flags, method, _, _, crc, packed, plain, name_length, extra_length = LOCAL_HEADER.unpack(head)
        data = position + LOCAL_HEADER.size + name_length + extra_length
        if signature != MEMBER or flags & _SIZES_FOLLOW or data + packed > size:
            break
        name = os.pread(fd, name_length, position + LOCAL_HEADER.size).decode("utf-8" if flags & _UTF8 else "cp437", "replace")
        entry = zipfile.ZipInfo(name)
        entry.header_offset, entry.CRC, entry.compress_size, entry.file_size = position, crc, packed, plain
        entry.compress_type, entry.flag_bits, entry.extract_version = method, flags, version
        entry.external_attr = ENTRY_MODE << 16
        members[name] = entry
        position = data + packed
    return list(members.values()), position


def append(fd: int, entries: Mapping[str, bytes], before: Opened | None) -> None:
    """Add `entries` to the zip behind `fd`, whose lock is held; one of a name that is there replaces it.

    Args:
        before: the zip as it is; None: a new one begins.

    Raises:
        OSError: the file could not be written; its entries are as before.
    """
    start = 0 if before is None else before.end
    grown: Any = Grown(fd, start)
    with zipfile.ZipFile(grown, "w", zipfile.ZIP_DEFLATED) as archive:
        if before is not None:
            archive.filelist.extend(entry for entry in before.entries if entry.filename not in entries)
        for name, content in entries.items():
            entry = zipfile.ZipInfo(name, time.localtime()[:6])
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = ENTRY_MODE << 16
            archive.writestr(entry, content)
    replaced = os.pread(fd, os.fstat(fd).st_size - start, start)
    try:
        _write(fd, grown.memory.getbuffer(), start)
    except OSError:
        with contextlib.suppress(OSError):
            _write(fd, memoryview(replaced), start)
        raise


def _write(fd: int, data: memoryview, position: int) -> None:
    end = position + data.nbytes
    while data.nbytes:
        written = os.pwrite(fd, data, position)
        data, position = data[written:], position + written
    os.ftruncate(fd, end)
