"""Files for reading: nothing is waited for, only regular files are taken, and no more is read than a file of its kind can have.

Links are followed, unless the caller says otherwise: people link their data from other disks.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from msprobe_engine.core.io.regular_files import AnyPath, OddFileError


def open_input(path: AnyPath, *, follow: bool = True) -> BinaryIO:
    """A regular file for reading; the caller closes it.

    Raises:
        OddFileError: it is a pipe, a socket, a directory or a device (or, without `follow`, a link).
        OSError: as the system says; also for a path with a zero byte.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW))
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), path) from None
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP) and os.path.lexists(path):  # a socket, or a link
            raise OddFileError(os.lstat(path).st_mode, path) from None
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise OddFileError(mode, path)
    return os.fdopen(fd, "rb")


def read_input(path: AnyPath, most: int, *, follow: bool = True) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as `open_input`; ``EFBIG`` for a file of more than `most` bytes.
    """
    with open_input(path, follow=follow) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes, and no such file is that large; it is damaged or something else", path)
    return data
