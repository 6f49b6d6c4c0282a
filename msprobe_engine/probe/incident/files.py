"""Files of an incident: those of a rank are appended to, by one write; merged ones appear whole, also when processes of several machines
write the same one on a shared file system."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.output_files import write_all, write_file
from msprobe_engine.core.io.regular_files import open_regular
from msprobe_engine.probe.incident.event import plain


def rank_file(directory: Path, rank: int) -> Path:
    """The monitor samples of a rank, and what it says of an incident."""
    return directory / f"samples_rank{rank}.jsonl"


def append_lines(path: Path, lines: Iterable[Any]) -> None:
    """Strict JSON, a line each; readers see all of them or, after a kill in between, a part that they can tell.

    Raises:
        OSError: they cannot be written; what stood there stays.
    """
    text = "".join(json.dumps(plain(line), allow_nan=False) + "\n" for line in lines)
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # by a full disk: this is no part of that line
        write_all(descriptor, [b"\n" * cut + text.encode("utf-8", "backslashreplace")])
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Strict JSON (see `plain`) by atomic rename."""
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """UTF-8; readers see the old file or the new one.

    Raises:
        OSError: it cannot be written; nothing partial stays.
    """
    write_file(path, [text.encode("utf-8", "backslashreplace")])
