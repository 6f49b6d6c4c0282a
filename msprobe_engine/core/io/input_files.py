"""Files for reading: nothing is waited for, only regular files are taken, and no more is read than a file of its kind can have.

Links are followed, unless the caller says otherwise: people link their data from other disks.
"""

from __future__ import annotations

import errno
import io
import os
from typing import Any, BinaryIO

from msprobe_engine.core.io.regular_files import AnyPath, OddFileError, open_regular


class OddInputError(OddFileError):
    """Something else is where a file should be read; commands end with 3."""


def open_input(path: AnyPath, *, follow: bool = True) -> BinaryIO:
    """A regular file for reading; the caller closes it.

    Raises:
        OddInputError: it is no regular file.
        OSError: otherwise as `open_regular`.
    """
    try:
        return os.fdopen(open_regular(path, follow=follow), "rb")
    except OddFileError as error:
        raise OddInputError(error.mode, path) from None


class FilePart(io.RawIOBase):
    """Some bytes of an open file as a file of their own, which has no descriptor.

    Args:
        owned: the file is closed with this one.
    """

    def __init__(self, file: BinaryIO, start: int, length: int, *, owned: bool = False) -> None:
        self._file, self._start, self._length, self._at, self._owned = file, start, max(0, length), 0, owned

    def _read_at(self, at: int, count: int) -> bytes:
        self._file.seek(self._start + at)
        return self._file.read(count) if count else b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, room: Any) -> int:
        data = self._read_at(self._at, max(0, min(len(room), self._length - self._at)))
        room[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if self._owned:
            self._file.close()
        super().close()


def open_part(path: AnyPath, start: int, stop: int) -> BinaryIO:
    """Some bytes of a regular file as a file of their own; raises as `open_input`."""
    return io.BufferedReader(FilePart(open_input(path), start, stop - start, owned=True))


def read_input(path: AnyPath, most: int, *, follow: bool = True) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as `open_regular`; ``EFBIG`` for a file of more than `most` bytes.
    """
    with open_input(path, follow=follow) as file:
        return read_opened(file, most, path)


def read_opened(file: BinaryIO, most: int, path: AnyPath) -> bytes:
    """The content of a file that is open at its beginning; raises as `read_input`."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    # Asked for by its size: a read of the limit would reserve as much memory. What has grown since, or has no size (/proc), by blocks.
    data = file.read(min(size, most) + 1)
    while len(data) <= most and (more := file.read(min(1 << 20, most + 1 - len(data)))):
        data += more
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes, and no such file is that large; it is damaged or something else", path)
    return data
