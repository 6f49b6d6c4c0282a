"""Reads of byte ranges into memory that is used again and again: `os.preadv`, which lets other threads run meanwhile.

Files are not mapped into memory: a mapped file that is cut off while it is read, or whose network mount goes away, ends the process with
SIGBUS, and its pages count as memory of the process.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from msprobe_engine.errors import DumpFormatError

Bytes = npt.NDArray[np.uint8]

_OPEN = 24
"""Files a thread keeps open."""
ALIGNMENT = 4096


class Unreadable(DumpFormatError):
    """Bytes of a tensor cannot be read; the comparison goes on with the next one."""


def buffer(nbytes: int) -> Bytes:
    """Memory whose first byte lies at a page boundary."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return raw[first : first + nbytes]


class FileReads:
    """The open files of one thread: not to be shared.

    Attributes:
        nbytes: read so far.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read(self, path: Path, start: int, into: Bytes) -> None:
        """Fill `into` with the bytes of `path` from `start`.

        Raises:
            Unreadable: the file is not there, may not be read, or ends before.
        """
        try:
            fd = self._descriptor(path)
            done = 0
            while done < into.size:
                got = os.preadv(fd, [into[done:].data], start + done)
                if got == 0:
                    size = os.fstat(fd).st_size
                    raise Unreadable(
                        f"{path}: ends at byte {size}; a tensor needs bytes {start} to {start + into.size}; the file is cut off"
                    )
                done += got
        except OSError as error:
            raise Unreadable(f"{path}: cannot be read: {error.strerror or error}") from error
        self.nbytes += done

    def close(self) -> None:
        """Close all files."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def _descriptor(self, path: Path) -> int:
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
            return fd
        if len(self._open) >= _OPEN:
            os.close(self._open.popitem(last=False)[1])
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open[path] = fd
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return fd


class ReadsOfThreads:
    """A `FileReads` per thread, closed together."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._all: list[FileReads] = []
        self._lock = threading.Lock()

    def mine(self) -> FileReads:
        """That of the calling thread."""
        found: FileReads | None = getattr(self._local, "reads", None)
        if found is None:
            found = self._local.reads = FileReads()
            with self._lock:
                self._all.append(found)
        return found

    @property
    def nbytes(self) -> int:
        """Read so far by all threads."""
        return sum(reads.nbytes for reads in self._all)

    def close(self) -> None:
        """Close the files of all threads; these must have ended."""
        for reads in self._all:
            reads.close()
