"""The mark of a step that is not finished (``.incomplete``): which one it is, and why it is not when the run itself knows.

::

    {"step": 5, "rank": 0, "pid": 4711, "start": "2026-01-31T12:00:00Z"[, "why": "ENOSPC"]}
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from msprobe_engine.core.errors import TextError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import write_all
from msprobe_engine.core.io.regular_files import open_regular
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats import loss_causes
from msprobe_engine.formats.dump import layout

_MOST_BYTES = 4096
_EMPTY = Sentence("its mark is empty, as one is that was made on a full disk")


def line(step: int, rank: int | None, why: str = "") -> bytes:
    start = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content: dict[str, object] = {"step": step, "rank": rank, "pid": os.getpid(), "start": start}
    return (json.dumps(content | ({"why": why} if why else {})) + "\n").encode()


def tell_why(directory: str, step: int, rank: int | None, why: str) -> None:
    """Put the cause into the mark, in place: a full disk has no room for another file. Never raises: what cannot be told here, the log
    tells."""
    with contextlib.suppress(OSError):
        fd = open_regular(f"{directory}/{layout.MARKER}", os.O_WRONLY | os.O_CREAT)
        try:
            content = line(step, rank, why)
            write_all(fd, [content])
            os.ftruncate(fd, len(content))
        finally:
            os.close(fd)


def why_unfinished(directory: Path) -> str:
    """Why the run could not finish the step in the directory of a rank, in words; empty when nothing tells."""
    try:
        content = read_input(directory / layout.MARKER, _MOST_BYTES, follow=False)
        if not content:
            return _EMPTY
        document = parse_json(content)
    except (OSError, TextError):
        return ""
    said = loss_causes.sentences(loss_causes.checked(document.get("why"))) if isinstance(document, dict) else []
    return said[0] if said else ""
