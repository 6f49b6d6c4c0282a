"""Small text and JSON files beside a checkpoint's tensors, read with a bound on their size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError, TextError
from msprobe_engine.core.io.damaged_files import guard_opening
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.json_text import parse_json as parse_text

_LARGEST_JSON = 256 << 20


def entries(directory: Path) -> set[str]:
    """Names in a directory.

    Raises:
        DumpFormatError: it cannot be read.
    """
    with guard_opening(directory):
        return set(os.listdir(directory))


def read_bytes(path: Path, most: int) -> bytes:
    """A small file.

    Raises:
        DumpFormatError: it cannot be read, is no regular file, or has more than `most` bytes.
    """
    with guard_opening(path), open_input(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DumpFormatError(f"{path}: has more than {most} bytes, which no such file has; it is damaged or something else")
    return data


def read_text(path: Path, most: int) -> str:
    """A small text file; see `read_bytes`."""
    return read_bytes(path, most).decode("utf-8", "replace")


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The object in JSON text.

    Raises:
        DumpFormatError: it is none, or is damaged.
    """
    try:
        found = parse_text(data)
    except TextError as error:
        raise DumpFormatError(f"{path}: is not JSON ({str(error)[:100]}); it is damaged or was cut off") from None
    if not isinstance(found, dict):
        raise DumpFormatError(f"{path}: holds a {type(found).__name__}, and an object should be there")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, _LARGEST_JSON), path)
