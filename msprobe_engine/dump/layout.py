"""Where things are in a dump directory, and how files get there.

{root}/step{N}/rank{R}/    of a distributed run; without a rank: proc{pid} (26.2.0 and this tool), rank (8.1.1)
    dump.json  stack.json  construct.json    level debug: debug.json only
    dump_tensor_data/                        one file per saved tensor
    not_saved.json                           tensors that were asked for and have no file, with the reason
    shapes.json                              task structure: the records without statistics
    .incomplete                              there while the step is not finished
    .frame.bin                               frame log, there until dump.json is (see `msprobe_engine.dump.framelog`)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from pathlib import Path

from msprobe_engine.errors import SinkError

DUMP, STACK, CONSTRUCT, DEBUG = "dump.json", "stack.json", "construct.json", "debug.json"
TENSORS = "dump_tensor_data"
RERUN = "rerun"
"""In an incident directory: the dump of the second run of a step, laid out like any other."""
NOT_SAVED, SHAPES = "not_saved.json", "shapes.json"
BENCH = "bench.json"
"""Account of a comparison with an earlier dump, see `msprobe_engine.dump.bench`."""
MARKER, FRAME_LOG = ".incomplete", ".frame.bin"
OWN_FILES = (DUMP, DEBUG, STACK, CONSTRUCT, NOT_SAVED, SHAPES, BENCH, FRAME_LOG, MARKER)
"""What a new run replaces in a step/rank directory that it writes, besides `TENSORS`."""

_STEP = re.compile(r"step([0-9]{1,18})")
_RANK = re.compile(r"rank([0-9]{1,9})?")
_PROCESS = re.compile(r"proc([0-9]{1,18})")
FILE_MODE, DIRECTORY_MODE = 0o640, 0o750
_MOST_PARTS = 1024  # of one writev, on every system there is
_HEADER_BYTES = 1024  # dump_data_dir is the fourth key


def step_of(name: str) -> int | None:
    """N of ``step{N}``, else None."""
    m = _STEP.fullmatch(name)
    return int(m[1]) if m else None


def rank_of(name: str) -> int | None:
    """R of ``rank{R}``, else None."""
    m = _RANK.fullmatch(name)
    return int(m[1]) if m and m[1] else None


def process_of(name: str) -> int | None:
    """The process id of ``proc{pid}``, else None."""
    m = _PROCESS.fullmatch(name)
    return int(m[1]) if m else None


def of_a_live_process(name: str) -> bool:
    """Is this ``proc{pid}`` of a process that runs on this machine now? False where that cannot be seen (no /proc)."""
    process = process_of(name)
    return process is not None and os.path.exists(f"/proc/{process}")


def is_rank_directory(name: str) -> bool:
    """True for ``rank{R}``, ``rank`` and ``proc{pid}``."""
    return _RANK.fullmatch(name) is not None or _PROCESS.fullmatch(name) is not None


def rank_directory(rank: int | None) -> str:
    """Name of this process' directory: ``rank{R}``, without a rank ``proc{pid}`` as 26.2.0 has it."""
    return f"proc{os.getpid()}" if rank is None else f"rank{rank}"


_ADVICE = {
    errno.ENOSPC: "the disk is full: free space or set dump_path to another disk",
    errno.EDQUOT: "the disk quota is used up: free space or set dump_path to another disk",
    errno.EACCES: "no permission: check the owner and mode of the directory or set dump_path to one you may write",
    errno.EPERM: "no permission: check the owner and mode of the directory or set dump_path to one you may write",
    errno.EROFS: "the file system is read-only: set dump_path to another one",
    errno.ENOTDIR: "a file is where a directory is needed: remove it or set another dump_path",
    errno.ELOOP: "remove the link, or set another dump_path",
    errno.ENAMETOOLONG: "the path is too long: set a shorter dump_path",
}


class DumpWriteError(SinkError):
    """A file of a dump directory cannot be written: `path`, `errno` and, in the message, what to do."""

    def __init__(self, error: OSError, path: Path | str) -> None:
        code = errno.errorcode.get(error.errno or 0, "no errno")
        advice = _ADVICE.get(error.errno or 0, "check that the directory exists and can be written")
        super().__init__(f"cannot write {path}: {error.strerror or error} ({code}); {advice}. Steps written before are untouched")
        self.path = str(path)
        self.errno = error.errno


def make_directories(path: str) -> None:
    """Create a directory and its parents, all with `DIRECTORY_MODE` (``os.makedirs`` gives its mode to the last one only).

    Raises:
        OSError: as the system says.
    """
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if parent in ("", path):
            raise
        make_directories(parent)
        _make_below(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def _make_below(path: str) -> None:
    """The parent is there now. Some file systems (/proc) refuse all the same, with the error of a missing parent: no third try."""
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def refuse_link(path: str) -> None:
    """Raises:
    OSError: `path` is a link. The root of a dump may be one (clusters link their disks); what is below it is ours and is not.
    """
    if os.path.islink(path) or os.path.islink(os.path.dirname(path)):
        raise OSError(errno.ELOOP, "a link is where a directory of the dump belongs", path)


def correct_data_dir(old: str, new: str) -> None:
    """After a rank directory was renamed from `old` to `new`: let the header of its dump.json (debug.json) name the new one.

    Raises:
        OSError: the file cannot be written again.
    """
    before, after = (json.dumps({"dump_data_dir": f"{path}/{TENSORS}"})[1:-1].encode() for path in (old, new))
    for name in (DUMP, DEBUG):
        try:
            with open(os.open(f"{new}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                text = file.read()
        except FileNotFoundError:
            continue
        if before in text[: _HEADER_BYTES + len(before)]:
            write_file(f"{new}/{name}", [text.replace(before, after, 1)])


def write_all(fd: int, parts: list[bytes | memoryview]) -> None:
    """All of `parts` into `fd`, in one system call unless there are more than a thousand or the kernel takes less."""
    left = [memoryview(p).cast("B") for p in parts if len(p)]
    at = 0
    while at < len(left):
        done = os.writev(fd, left[at : at + _MOST_PARTS])
        while at < len(left) and done >= len(left[at]):
            done -= len(left[at])
            at += 1
        if done:
            left[at] = left[at][done:]


def write_file(path: Path | str, parts: list[bytes | memoryview]) -> None:
    """Write a file so that it is there whole or not at all: under a temporary name, then renamed.

    Raises:
        OSError: as the system says; the temporary file is removed.
    """
    head, tail = os.path.split(path)
    temporary = os.path.join(head, f".{tail}.{os.getpid()}.tmp")
    try:
        write_plain(temporary, parts)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_named(path: Path | str, parts: list[bytes | memoryview]) -> None:
    """`write_file` for a file that the user named: a device or a pipe (``/dev/stdout``) is written to, not replaced.

    Raises:
        OSError: as the system says.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        with open(path, "wb", buffering=0) as file:
            write_all(file.fileno(), parts)
    else:
        write_file(path, parts)


def write_plain(path: Path | str, parts: list[bytes | memoryview]) -> None:
    """Write a file in place. A link in its place is not followed."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        write_all(fd, parts)
    finally:
        os.close(fd)
