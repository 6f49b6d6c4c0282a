"""Reads of byte ranges into memory that is used again and again: `os.preadv`, which lets other threads run meanwhile.

Files are not mapped into memory: a mapped file that is cut off while it is read, or whose network mount goes away, ends the process with
SIGBUS, and its pages count as memory of the process.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.regular_files import open_regular

kernel: Any
"""The module of the C kernel, None where it was not built."""
try:
    kernel = importlib.import_module("msprobe_engine.native._tensordiff")
except ImportError:
    kernel = None

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
                    raise _ends_early(path, os.fstat(fd).st_size, start, into.size)
                done += got
        except OSError as error:
            raise Unreadable(f"{path}: cannot be read: {error.strerror or error}") from error
        self.nbytes += done

    def read_runs(self, path: Path, start: int, run: int, stride: int, count: int, into: npt.NDArray[Any], step: int) -> None:
        """Read `count` runs of `run` bytes that lie `stride` apart in the file, to places `step` bytes apart from the start of `into`.

        Raises:
            Unreadable: see `read`.
        """
        if kernel is None:
            for k in range(count):
                # Bytes of an array's memory from its first element on, whatever its strides
                raw = (ctypes.c_uint8 * run).from_address(into.ctypes.data + k * step)
                self.read(path, start + k * stride, np.frombuffer(memoryview(raw), np.uint8))
            return
        try:
            done, error = kernel.read_runs(self._descriptor(path), start, run, stride, count, into.ctypes.data, step)
        except OSError as failed:
            raise Unreadable(f"{path}: cannot be read: {failed.strerror or failed}") from failed
        self.nbytes += done * run
        if done < count and error:
            raise Unreadable(f"{path}: cannot be read: {os.strerror(error)}")
        if done < count:
            raise _ends_early(path, os.fstat(self._descriptor(path)).st_size, start + done * stride, run)

    def close(self) -> None:
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
        fd = open_regular(path, follow=True)
        self._open[path] = fd
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return fd


def _ends_early(path: Path, size: int, start: int, nbytes: int) -> Unreadable:
    return Unreadable(f"{path}: ends at byte {size}; a tensor needs bytes {start} to {start + nbytes}; the file is cut off")


class ReadsOfThreads:
    """A `FileReads` per thread, closed together."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._all: list[FileReads] = []
        self._lock = threading.Lock()

    def mine(self) -> FileReads:
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
