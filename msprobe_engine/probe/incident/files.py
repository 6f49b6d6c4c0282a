"""Files that appear whole, also when processes of several machines write the same one on a shared file system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.probe.incident.event import plain


def write_json(path: Path, value: Any) -> None:
    """Strict JSON (see `plain`) by atomic rename."""
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """UTF-8; readers see the old file or the new one.

    Raises:
        OSError: it cannot be written; nothing partial stays.
    """
    write_file(path, [text.encode("utf-8", "backslashreplace")])
