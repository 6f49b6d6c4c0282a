"""Names and small files of a shared directory.

``DIRECTORY/rank{rank}-{session}/`` belongs to one start of one training process. In it: ``{sequence:012d}[.step{step}].msg``, a frame of
`online.frames` each, with CRC-32; ``alive.json``, written anew at every heartbeat; ``end.json`` once this was all; and
``{sequence:012d}.refused`` for what the server could not use. A file is made under a name that begins with a dot, then renamed, so a
name that is there has all of its contents. No clock of any host plays a part: a client lives as long as ``alive.json`` goes on changing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import open_regular

ALIVE, END = "alive.json", "end.json"
FOLDER_MODE = 0o770
"""The server removes what it has taken, so its group may write into a folder."""
_FOLDER = re.compile(r"rank([0-9]{1,8})-([0-9a-f]{32})")
_MESSAGE = re.compile(r"([0-9]{12,18})(?:\.step[0-9]{1,12})?\.msg")
_LARGEST_NOTE = 64 << 10


def folder_name(rank: int, session: str) -> str:
    """Of one start of one training process."""
    return f"rank{rank}-{session}"


def parse_folder(name: str) -> tuple[int, str] | None:
    """Rank and session, or None for another name."""
    found = _FOLDER.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def message_name(sequence: int, step: int | None) -> str:
    return f"{sequence:012d}{'' if step is None or step < 0 else f'.step{step}'}.msg"


def parse_message_name(name: str) -> int | None:
    """The sequence, or None for another name."""
    found = _MESSAGE.fullmatch(name)
    return int(found[1]) if found else None


def write_note(path: Path, note: Mapping[str, Any]) -> None:
    """One of the JSON files.

    Raises:
        OSError: it cannot be written.
    """
    write_file(path, [json.dumps(note).encode()])


def read_note(path: Path) -> dict[str, Any] | None:
    """A JSON file, None when it is not there, is something else, or is damaged."""
    try:
        descriptor = open_regular(path)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            found = parse_json(file.read(_LARGEST_NOTE))
        except (OSError, ValueError):
            return None
    return found if isinstance(found, dict) else None
