"""Names and small files of a shared directory.

``DIRECTORY/rank{rank}-{session}/`` belongs to one life of one training process. In it: ``{sequence:012d}[.step{step}].msg``, a frame of
`online.frames` each, with CRC-32; ``alive.json``, written anew at every heartbeat; ``end.json`` once this was all; and
``{sequence:012d}.refused`` for what the server could not use. A file is made as ``.{...}.part`` and renamed, so a name that is there has
all of its contents. No clock of any host plays a part: a client lives as long as ``alive.json`` goes on changing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.output_files import write_all

ALIVE, END = "alive.json", "end.json"
FILE_MODE, FOLDER_MODE = 0o640, 0o770
"""The server removes what it has taken, so its group may write into a folder."""
_FOLDER = re.compile(r"rank([0-9]{1,8})-([0-9a-f]{32})")
_MESSAGE = re.compile(r"([0-9]{12,18})(?:\.step[0-9]{1,12})?\.msg")
_LARGEST_NOTE = 64 << 10


def folder_name(rank: int, session: str) -> str:
    """Of one life of one training process."""
    return f"rank{rank}-{session}"


def parse_folder(name: str) -> tuple[int, str] | None:
    """Rank and session, or None for another name."""
    found = _FOLDER.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def message_name(sequence: int, step: int | None) -> str:
    """Of one message."""
    return f"{sequence:012d}{'' if step is None or step < 0 else f'.step{step}'}.msg"


def parse_message_name(name: str) -> int | None:
    """The sequence, or None for another name."""
    found = _MESSAGE.fullmatch(name)
    return int(found[1]) if found else None


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Make the file under another name and rename it.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    part = path.parent / f".{path.name}.part"
    with contextlib.suppress(FileNotFoundError):
        part.unlink()  # of an attempt that was killed
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            write_all(descriptor, list(pieces))
        finally:
            os.close(descriptor)  # a network file system may say only here that its disk is full
        os.rename(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def write_note(path: Path, note: Mapping[str, Any]) -> None:
    """One of the JSON files.

    Raises:
        OSError: it cannot be written.
    """
    write_file(path, [json.dumps(note).encode()])


def open_regular(path: Path) -> int:
    """A descriptor of a regular file; a link, a pipe or a device is none.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def read_note(path: Path) -> dict[str, Any] | None:
    """A JSON file, None when it is not there, is something else, or is damaged."""
    try:
        descriptor = open_regular(path)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            found = json.loads(file.read(_LARGEST_NOTE))
        except (OSError, ValueError, RecursionError):
            return None
    return found if isinstance(found, dict) else None
