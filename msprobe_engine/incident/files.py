"""Files that appear whole, also when processes of several machines write the same one on a shared file system."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from msprobe_engine.incident.event import plain


def write_json(path: Path, value: Any) -> None:
    """Strict JSON (see `plain`) by atomic rename."""
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write aside under a random name, then rename: readers see the old file or the new one. Mode 0640.

    Raises:
        OSError: it cannot be written; nothing partial stays.
    """
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            os.fchmod(file.fileno(), 0o640)
            file.write(text)
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            os.unlink(aside)
        raise
