"""How files are opened beside a training: nothing waits, no link is followed, and what is no regular file is refused.

A named pipe blocks whoever opens it until somebody opens its other end, a device may do anything, and a link leads to a file that is
not ours. All three can stand where an output goes: as a leftover, or planted in a directory that several people share.

A new file has the mode 0640 and a new directory 0750, less what the umask of the user takes away: a file is never given a mode after it
was made, because that would undo a stricter umask.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from functools import partial
from typing import Any, TypeAlias

AnyPath: TypeAlias = "str | bytes | os.PathLike[str]"

FILE_MODE, DIRECTORY_MODE = 0o640, 0o750
SAFELY = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
"""Flags of every `os.open`; `open_regular` takes the one away that refuses links where its caller follows them."""
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY
"""Flags for a file that is not there yet. What `os.open` makes with them is a regular file, so nothing needs to be asked afterwards."""

_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _kind(mode: int) -> str:
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a regular file" if stat.S_ISREG(mode) else "something unknown")


def kind_of_file(path: AnyPath) -> str:
    """What is at `path`, or where a link leads, in words."""
    return _kind(os.stat(path).st_mode)


class OddFileError(OSError):
    """Something else is where a regular file (or a directory) belongs; `strerror` says what it is and what to do."""

    def __init__(self, mode: int, path: AnyPath, *, directory: bool = False) -> None:
        needed = "a directory" if directory else "a regular file"
        kind = _kind(mode)
        number = errno.ENOTDIR if directory else errno.ELOOP if stat.S_ISLNK(mode) else errno.EISDIR if stat.S_ISDIR(mode) else errno.EEXIST
        super().__init__(number, f"{kind} is where {needed} belongs: move it away", path)
        self.mode = mode
        self._directory = directory

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), directory=self._directory), (self.mode, self.filename)  # OSError would give its own arguments


def open_regular(path: AnyPath, flags: int = os.O_RDONLY, *, mode: int = FILE_MODE, dir_fd: int | None = None, follow: bool = False) -> int:
    """A descriptor of a regular file.

    Args:
        flags: how to open it, besides `SAFELY`.
        mode: of a new file, less the umask.
        dir_fd: directory that a relative path starts from.
        follow: take a link for what it leads to.

    Raises:
        OddFileError: it is a pipe, a socket, a directory or a device (or, without `follow`, a link).
        FileExistsError: with ``O_EXCL``, whatever is there.
        OSError: as the system says; also for a path with a zero byte.
    """
    try:
        fd = os.open(path, flags | (SAFELY & ~os.O_NOFOLLOW if follow else SAFELY), mode, dir_fd=dir_fd)
    except FileExistsError:
        raise  # O_EXCL: whatever is there
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), path) from None
    except OSError:
        # ELOOP of a link, ENXIO of a pipe or socket, EISDIR, ...: what it is says more.
        require_regular(path, dir_fd=dir_fd, follow=follow)
        raise
    try:
        file_mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(file_mode):
            raise OddFileError(file_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def require_regular(path: AnyPath, *, dir_fd: int | None = None, follow: bool = False) -> None:
    """Nothing, or a regular file, is at `path`.

    Raises:
        OddFileError: something else is.
    """
    try:
        mode = os.stat(path, dir_fd=dir_fd, follow_symlinks=follow).st_mode
    except (OSError, ValueError):
        return  # nothing is there, or whoever opens it hears the reason
    if not stat.S_ISREG(mode):
        raise OddFileError(mode, path)


_ODD_PARENT = (errno.ENOTDIR, errno.ELOOP)
"""A parent is something else, or a link that leads to itself."""


def make_directories(path: str) -> None:
    """Create a directory and its parents, all with `DIRECTORY_MODE` (``os.makedirs`` gives its mode to the last one only). Links to
    directories are followed: clusters link their disks.

    Raises:
        OddFileError: something else is in its place, or in that of a parent.
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
        require_directory(path)
    except OSError as error:
        if error.errno in _ODD_PARENT:
            require_directory(os.path.dirname(path))
        raise


def _make_below(path: str) -> None:
    """The parent is there now. Some file systems (/proc) refuse all the same, with the error of a missing parent: no third try."""
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        require_directory(path)


def require_directory(path: str) -> None:
    """Something is at `path`: a directory, or a link to one.

    Raises:
        OddFileError: it is something else, or a parent is.
    """
    if os.path.isdir(path):
        return
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno in _ODD_PARENT:
            require_directory(os.path.dirname(path))
        raise
    raise OddFileError(status.st_mode, path, directory=True)


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ADVICE = {
    errno.ENOSPC: "the disk is full{free}: free some space there or {elsewhere}",
    errno.EDQUOT: "the disk quota is used up{free}: free some space there or {elsewhere}",
    errno.EMFILE: "the process may open no more: raise that number (`ulimit -n 65536` before the start)",
    errno.ENFILE: "no process of this machine may open more: raise that number (sysctl fs.file-max)",
    errno.EACCES: "no permission: check the owner and mode of the directory or {elsewhere}",
    errno.EPERM: "no permission: check the owner and mode of the directory or {elsewhere}",
    errno.EROFS: "the file system is read-only: {elsewhere}",
    errno.ENOENT: "the directory is not there: make it again or {elsewhere}",
    errno.ENOTDIR: "a file is where a directory is needed: move it away or {elsewhere}",
    errno.EISDIR: "a directory is where a regular file belongs: move it away or {elsewhere}",
    errno.ELOOP: "links are not followed: move it away or {elsewhere}",
    errno.ENAMETOOLONG: "the path is too long: {elsewhere} with a shorter path",
}


def explain(error: OSError, elsewhere: str = "name another place", *, path: AnyPath | None = None) -> str:
    """What went wrong and what to do.

    Args:
        elsewhere: how the user chooses another place, ``set dump_path to another one``.
        path: what is written, when the error does not name it; says how much is free there.
    """
    if isinstance(error, OddFileError):
        return f"{error.strerror}, or {elsewhere}"
    if error.errno == errno.EFBIG:
        return f"{error.strerror}; {_explain_file_limit(elsewhere)}"
    place = error.filename if path is None else path
    free = _free_space(place) if error.errno in _DISK_FULL and isinstance(place, (str, bytes, os.PathLike)) else ""
    advice = _ADVICE.get(error.errno or 0, "is the directory still there and writable? free some space or {elsewhere}")
    return f"{error.strerror or error}; {advice.format(elsewhere=elsewhere, free=free)}"


def file_size_limit() -> int:
    """Bytes that a file of this process may have; -1: the system sets no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit


def _explain_file_limit(elsewhere: str) -> str:
    limit = file_size_limit()
    if limit < 0:
        return f"the file system takes no larger file: {elsewhere}"
    return f"a file of this process may have {limit:,} bytes and no more: raise that limit (`ulimit -f unlimited` before the start)"


def _free_space(path: AnyPath) -> str:
    """How much is free where `path` lies or would lie; empty when the system does not say."""
    place = os.path.abspath(os.fsdecode(path))
    while not os.path.isdir(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    try:
        disk = os.statvfs(place)
    except OSError:
        return ""
    inodes = ", and no further file fits" if disk.f_files and not disk.f_favail else ""
    return (
        f" ({disk.f_bavail * disk.f_frsize / 2**20:,.1f} of {disk.f_blocks * disk.f_frsize / 2**20:,.1f} MiB are free at {place}{inodes})"
    )
