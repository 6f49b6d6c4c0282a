"""An OSError that no reader or writer has put into words: is it about a file that the user named, or a bug of ours?

Only what the user named in this call, or what lies below a directory that the user named, is the user's: a path that is computed wrongly, a
directory of our own that is gone, or a file of the system are bugs, and are reported as such.
"""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from msprobe_engine.core.io.regular_files import explain

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""EFBIG is also an input that is larger than any of its kind (`core.io.input_files`)."""
_OUTPUTS = ("output", "output_path", "output_dir", "output_dirpath", "out_path", "api_output_path", "db", "json", "csv", "html", "markdown")
"""Options that name what is written, by where `argparse` keeps their values."""


class FileError(NamedTuple):
    """What is said.

    Attributes:
        text: with the file.
        wrote: it is about an output.
    """

    text: str
    wrote: bool


def describe(error: BaseException, options: argparse.Namespace) -> FileError | None:
    """What is said of an error; None: it is no file of the user's.

    Args:
        options: of this call.
    """
    if not isinstance(error, OSError):
        return None
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes, os.PathLike)) else None
    options_of_path = [(place, name in _OUTPUTS) for name, value in vars(options).items() for place in _places(value)]
    named = [each for each in options_of_path if path is not None and _is_below(path, each[0])]
    wrote = max(named, key=lambda each: len(each[0]))[1] if named else None  # of an output within an input the output counts
    if error.errno in _FULL and (wrote is not False or error.errno != errno.EFBIG):  # also of the standard output, which may be a file
        where = f": {path[:1000]}" if path else ""
        return FileError(f"cannot write all of the output{where}: {explain(error)}", wrote=True)
    if path is None or wrote is None:
        return None
    if wrote:
        return FileError(f"cannot write {path[:1000]}: {explain(error)}", wrote=True)
    return FileError(f"{path[:1000]}: {error.strerror}; check the name, owner and mode", wrote=False)


def _places(value: Any) -> Iterator[str]:
    """Paths in the value of an option: as it is, or behind a ``=``."""
    for each in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(each, os.PathLike):
            yield os.path.realpath(each)
        elif isinstance(each, str) and each and "\0" not in each:
            yield os.path.realpath(each)
            if "=" in each:
                yield os.path.realpath(each.partition("=")[2])


def _is_below(path: str, place: str) -> bool:
    real = os.path.realpath(path)
    return real == place or real.startswith(place.rstrip(os.sep) + os.sep)
