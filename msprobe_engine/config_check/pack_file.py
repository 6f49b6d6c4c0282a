"""A zip that many processes add entries to, each in its turn, and that is readable after any of them was killed.

A zip ends with its directory. New entries take the directory's place and a longer one follows; all of it is made in memory and handed to
the system in one call, under an exclusive lock of the file. Where that call fails (disk full), the old directory is put back. A process
that is killed inside the call leaves a zip without a directory: `opened` finds the entries by the headers in front of them.

The lock is `flock` on the zip itself, as the existing tool takes it. Some file systems have no locks (mounts of Lustre and NFS): `Refused`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import struct
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core.io.regular_files import explain, open_regular
from msprobe_engine.errors import SinkError
from msprobe_engine.log import one_line

ENTRY_MODE = 0o600
"""Of an entry, for whoever extracts it; as the existing tool has it."""
PATIENCE = 120.0
"""Seconds to wait for another process' turn."""
MOST_ENTRIES = 1_000_000
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
_LOCAL = struct.Struct("<4s5H3L2H")
"""Header of an entry (PKWARE APPNOTE 4.3.7): signature, version, flags, method, time, date, CRC, two sizes, lengths of name and extra."""
_SIZES_FOLLOW = 0x8
_UTF8 = 0x800


class Refused(Exception):
    """The file system has no locks."""


@contextlib.contextmanager
def locked(path: Path, lock: Path | None = None) -> Iterator[int]:
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
            _take(guard, path)
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


def _take(fd: int, path: Path) -> None:
    until, pause = time.monotonic() + PATIENCE, 0.002
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in _NO_LOCKS:
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
        end: where its last entry ends, and its directory begins.
        damaged: its directory was lost; these are the entries in front of `end` that are whole.
    """

    zip: zipfile.ZipFile
    end: int
    damaged: bool


@contextlib.contextmanager
def opened(fd: int) -> Iterator[Opened]:
    """The zip behind `fd`.

    Raises:
        zipfile.BadZipFile: this is no zip, nor what is left of one.
    """
    size = os.fstat(fd).st_size
    whole: Any = Grown(fd, size)
    try:
        archive = zipfile.ZipFile(whole)
        end, damaged = archive.start_dir, False
    except (zipfile.BadZipFile, struct.error):
        found, end = _entries(fd, size)
        if not found:
            raise zipfile.BadZipFile("no entries") from None
        rest: Any = Grown(fd, end)
        with zipfile.ZipFile(rest, "w") as directory:
            directory.filelist.extend(found)
        archive, damaged = zipfile.ZipFile(rest), True
    with archive:
        yield Opened(archive, end, damaged)


def _entries(fd: int, size: int) -> tuple[list[zipfile.ZipInfo], int]:
    """The entries that lie one behind the other from the start of the file, and where the last one ends."""
    found: dict[str, zipfile.ZipInfo] = {}
    at = 0
    while len(found) < MOST_ENTRIES:
        head = os.pread(fd, _LOCAL.size, at)
        if len(head) < _LOCAL.size:
            break
        signature, version, flags, method, _, _, crc, packed, plain, name_length, extra_length = _LOCAL.unpack(head)
        data = at + _LOCAL.size + name_length + extra_length
        if signature != b"PK\x03\x04" or flags & _SIZES_FOLLOW or data + packed > size:
            break
        name = os.pread(fd, name_length, at + _LOCAL.size).decode("utf-8" if flags & _UTF8 else "cp437", "replace")
        entry = zipfile.ZipInfo(name)
        entry.header_offset, entry.CRC, entry.compress_size, entry.file_size = at, crc, packed, plain
        entry.compress_type, entry.flag_bits, entry.extract_version = method, flags, version
        entry.external_attr = ENTRY_MODE << 16
        found[name] = entry
        at = data + packed
    return list(found.values()), at


def content(fd: int, entry: zipfile.ZipInfo) -> bytes:
    """One entry, without a look at the directory: of a pack of thousands of ranks that is what reading takes long for.

    Raises:
        zipfile.BadZipFile: it is damaged, or packed in a way that packs are not.
    """
    head = os.pread(fd, _LOCAL.size, entry.header_offset)
    if len(head) < _LOCAL.size or not head.startswith(b"PK\x03\x04"):
        raise zipfile.BadZipFile("its header is not where the directory says")
    *_, name_length, extra_length = _LOCAL.unpack(head)
    packed = os.pread(fd, entry.compress_size, entry.header_offset + _LOCAL.size + name_length + extra_length)
    if entry.compress_type == zipfile.ZIP_STORED:
        data = packed
    elif entry.compress_type == zipfile.ZIP_DEFLATED:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, entry.file_size + 1)
    else:
        raise zipfile.BadZipFile(f"it is packed by method {entry.compress_type}; 0 and 8 (deflate) are allowed")
    if len(data) != entry.file_size or zlib.crc32(data) != entry.CRC:
        raise zipfile.BadZipFile("its size or checksum is not that of the directory")
    return data


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
            archive.filelist.extend(entry for entry in before.zip.infolist() if entry.filename not in entries)
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


def _write(fd: int, data: memoryview, at: int) -> None:
    end = at + data.nbytes
    while data.nbytes:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done
    os.ftruncate(fd, end)
