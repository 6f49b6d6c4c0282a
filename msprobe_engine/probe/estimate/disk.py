"""The disk a dump will be written to: free space, block size, speed."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from msprobe_engine.core.errors import UsageError

ASSUMED_SPEED, ASSUMED_PER_FILE = 500e6, 100e-6
"""Bytes per second and seconds per file where nothing was measured: a local SSD, or a file server over 10 Gbit/s."""
_SAMPLE, _FILES = 64 << 20, 200
_LONGEST = 3.0  # seconds


class Speed(NamedTuple):
    """How fast files are written.

    Attributes:
        bytes_per_second: of large writes.
        seconds_per_file: what each file costs besides its bytes.
        measured: False: assumed.
    """

    bytes_per_second: float = ASSUMED_SPEED
    seconds_per_file: float = ASSUMED_PER_FILE
    measured: bool = False

    def seconds(self, nbytes: float, files: float) -> float:
        """Time to write so much."""
        return nbytes / self.bytes_per_second + files * self.seconds_per_file


class Space(NamedTuple):
    """What is left on a disk. `free`: bytes for this user; `block`: smallest unit a file takes."""

    path: Path
    free: int
    block: int


def find_existing_parent(path: Path) -> Path:
    """`path` or the nearest directory above it that exists."""
    path = path.absolute()
    while not os.path.isdir(path) and path != path.parent:  # Path.is_dir raises where a name is too long
        path = path.parent
    return path


def space(path: Path) -> Space:
    """Free space where `path` is, or will be.

    Raises:
        UsageError: it cannot be asked for.
    """
    place = find_existing_parent(path)
    try:
        volume = os.statvfs(place)
    except OSError as error:
        raise UsageError(f"{place}: free space is not known ({error.strerror}); give another directory") from None
    return Space(place, volume.f_bavail * volume.f_frsize, volume.f_bsize if 512 <= volume.f_bsize <= 1 << 20 else 4096)


def measure(path: Path) -> Speed:
    """Write up to 64 MiB and 200 small files where `path` is, or will be, with the bytes forced to the disk, and remove them again;
    at most about three seconds.

    Raises:
        UsageError: nothing can be written there.
    """
    place = find_existing_parent(path)
    chunk = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryDirectory(prefix=".msprobe_disk_", dir=place) as folder:
            begin = time.perf_counter()
            nbytes = 0
            with open(os.path.join(folder, "large"), "wb", buffering=0) as file:
                while nbytes < _SAMPLE and time.perf_counter() - begin < _LONGEST:
                    nbytes += file.write(chunk)
                os.fsync(file.fileno())
            speed = nbytes / (time.perf_counter() - begin)
            begin, written = time.perf_counter(), 0
            while written < _FILES and time.perf_counter() - begin < _LONGEST:
                with open(os.path.join(folder, str(written)), "wb", buffering=0) as file:
                    file.write(chunk[:4096])
                written += 1
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            each = (time.perf_counter() - begin) / written
    except OSError as error:
        raise UsageError(f"{place}: cannot be written to ({error.strerror}); choose another dump_path") from None
    return Speed(speed, max(0.0, each - 4096 / speed), True)
