"""Files for reading: nothing is waited for, only regular files are taken, and no more is read than a file of its kind can have.

Links are followed, unless the caller says otherwise: people link their data from other disks.
"""

from __future__ import annotations

import errno
import os
from typing import BinaryIO

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


def read_input(path: AnyPath, most: int, *, follow: bool = True) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as `open_regular`; ``EFBIG`` for a file of more than `most` bytes.
    """
    with open_input(path, follow=follow) as file:
        # Asked for by its size: a read of the limit would reserve as much memory. What has grown since, or has no size (/proc), by blocks.
        data = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
        while len(data) <= most and (more := file.read(min(1 << 20, most + 1 - len(data)))):
            data += more
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes, and no such file is that large; it is damaged or something else", path)
    return data
