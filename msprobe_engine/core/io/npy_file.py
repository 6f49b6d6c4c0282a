"""The one entry for ``.npy`` files: an array of numbers, mapped, never unpickled.

The header is Python text, and what numpy raises for a damaged one is of many types (TokenError of the tokenizer, SyntaxError, TypeError).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import guard_opening
from msprobe_engine.core.io.input_files import open_input

T = TypeVar("T")
_TRIES = 16


def read_header(read: Callable[[], T]) -> T:
    """What `read` makes of a header. CPython counts how deep Python text is nested in one place for all threads (gh-106905): where a
    garbage collection lets another thread in, the count of both is off, and a SystemError comes that says nothing of the file. It is read
    again.

    Args:
        read: reads the header from its begin.

    Raises:
        SystemError: it came each time.
    """
    for _ in range(_TRIES - 1):
        try:
            return read()
        except SystemError:
            continue
    return read()


def map_array(path: Path, *, follow: bool = True) -> npt.NDArray[Any]:
    """The array of a file, mapped: a header that promises more than the file holds is refused before memory is taken.

    Args:
        follow: links, too.

    Raises:
        DumpFormatError: it is not there, no regular file, or no array file.
    """
    try:
        with guard_opening(path):
            open_input(path, follow=follow).close()
            array: Any = read_header(lambda: np.load(path, mmap_mode="r", allow_pickle=False))
    except DumpFormatError:
        raise
    except Exception as error:  # see the module
        raise DumpFormatError(f"{path}: is no numpy file or is damaged ({' '.join(str(error).split())[:120]})") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise DumpFormatError(f"{path}: is an archive of arrays and no array file")
    return array
