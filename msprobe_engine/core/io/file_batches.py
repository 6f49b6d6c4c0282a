"""Writes many files in one go: the C implementation when it was built, which lets other threads run all the while; otherwise Python,
with the same results."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from msprobe_engine.core.io.output_files import write_all
from msprobe_engine.core.io.regular_files import FILE_MODE, NEW_FILE

_LARGE = 1 << 20  # bytes; a smaller file is written when the system thinks fit


class Job(NamedTuple):
    """One file.

    Attributes:
        temporary: the name under which it is written; a process killed in the middle leaves no half file under another.
        name: what it is called when it is complete; None: it keeps the temporary name.
        head, tail: content before and after the memory.
        address, nbytes: memory in between.
    """

    temporary: bytes
    name: bytes | None
    head: bytes
    address: int
    nbytes: int
    tail: bytes


def send_off(fd: int) -> None:
    """Let the system begin to write a large file to the disk now, without a wait; by itself it would begin seconds later, when the
    training may want the disk for its own checkpoint."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def write_files(directory: int, jobs: list[Job]) -> list[int]:
    """Write each file, in order, mode 0640.

    Returns:
        One errno per job, 0 when it was done. Of a file that failed nothing stays.
    """
    return _function()(directory, jobs)


@lru_cache(maxsize=1)
def _function() -> Callable[[int, list[Job]], list[int]]:
    try:
        compiled: Callable[[int, list[Job]], list[int]] = importlib.import_module("msprobe_engine.native._filewrite").write_files
    except ImportError:
        return write_files_python
    return compiled


def write_files_python(directory: int, jobs: list[Job]) -> list[int]:
    """`write_files` without C."""
    return [_write_file(directory, job) for job in jobs]


def _write_file(directory: int, job: Job) -> int:
    try:
        fd = os.open(job.temporary, NEW_FILE, FILE_MODE, dir_fd=directory)
    except OSError as error:
        return error.errno or 1
    try:
        try:
            memory = (ctypes.c_char * job.nbytes).from_address(job.address) if job.nbytes else b""
            write_all(fd, [job.head, memoryview(memory).cast("B"), job.tail])
            if job.nbytes >= _LARGE:
                send_off(fd)
        finally:
            os.close(fd)  # some file systems say only now that they are full
        if job.name is not None:
            os.rename(job.temporary, job.name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(job.temporary, dir_fd=directory)
        return error.errno or 1
    return 0
