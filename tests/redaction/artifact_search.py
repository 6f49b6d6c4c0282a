"""Looks for token ids and texts in everything a run has written: text, binary numbers of every usual width, and what lies compressed."""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

_NUMBER = re.compile(rb"(?<![0-9.])-?[0-9]{4,}")
_DEEPEST = 4
KINDS = ("<i4", ">i4", "<f4", ">f4", "<f8", ">f8")
"""An int32 is the lower half of an int64."""


def contents(name: str, data: bytes, depth: int = 0) -> Iterator[tuple[str, bytes]]:
    """The bytes of a file, and those of what is compressed in it."""
    yield name, data
    if depth == _DEEPEST:
        return
    if data[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                yield from contents(f"{name}/{info.filename}", archive.read(info), depth + 1)
    elif data[:2] == b"\x1f\x8b":
        yield from contents(f"{name}.unpacked", gzip.decompress(data), depth + 1)
    elif data[:1] == b"\x78":
        try:
            yield from contents(f"{name}.inflated", zlib.decompress(data), depth + 1)
        except zlib.error:
            return


def _forms(text: str) -> set[bytes]:
    """A text as files may have it: UTF-8, UTF-16, and escaped as JSON and Python do."""
    escaped = json.dumps(text)[1:-1]
    return {text.encode(), text.encode("utf-16-le"), escaped.encode(), escaped.replace("\\u", "\\U0000").encode()}


def _numbers_in(data: bytes, kind: str, ids: Sequence[int]) -> int:
    """How many of the ids stand in the bytes, at whatever place."""
    known, width, seen = np.array(sorted(ids), kind), np.dtype(kind).itemsize, set()
    for start in range(min(width, len(data))):
        values = np.frombuffer(data, kind, (len(data) - start) // width, start)
        with np.errstate(invalid="ignore"):
            near = values[(values >= known[0]) & (values <= known[-1])]
        seen |= set(np.intersect1d(near, known).tolist())
    return len(seen)


def finds(directory: Path, ids: Sequence[int], texts: Sequence[str]) -> list[str]:
    """Where any of the ids or texts stands: ``file: what, how``."""
    wanted = set(ids)
    found = [f"{path}: {text}, name" for path in map(str, directory.rglob("*")) for text in texts if text in path]
    seen: set[bytes] = set()
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()):
        for name, data in contents(str(path.relative_to(directory)), path.read_bytes()):
            if data in seen:  # tensors have several names, and stay the same from step to step
                continue
            seen.add(data)
            found += [f"{name}: {text}" for text in texts if any(form in data for form in _forms(text))]
            numbers = wanted & {int(match.group()) for match in _NUMBER.finditer(data) if len(match.group()) < 20}
            found += [f"{name}: {number}, text" for number in sorted(numbers)[:3]]
            found += [f"{name}: {count} ids, {kind}" for kind in KINDS if (count := _numbers_in(data, kind, ids))]
    return found
