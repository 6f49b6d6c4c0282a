"""YAML, JSON and TOML files, and hostfiles, as flat dotted keys with bounds: no aliases that grow, no tags that make objects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import guard_opening
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.yaml_text import parse_foreign_yaml

SUFFIXES = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}
MAX_BYTES = {"yaml": 1 << 20, "json": 16 << 20, "toml": 1 << 20, "text": 1 << 20}
MAX_VALUES = 50_000
MAX_DEPTH = 50
MAX_TEXT = 10_000


def read_text(path: Path, kind: str = "text") -> str:
    """A text file of bounded size.

    Raises:
        DumpFormatError: it is missing, no regular file, too large or no text.
    """
    with guard_opening(path), open_input(path) as file:
        raw = file.read(MAX_BYTES[kind] + 1)
    if len(raw) > MAX_BYTES[kind]:
        raise DumpFormatError(
            f"{path}: larger than {MAX_BYTES[kind]} bytes; a script or settings file is small, is this another kind of file?"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if b"\0" in raw:
            raise DumpFormatError(f"{path}: is no text file (byte {raw.index(0)} is zero)") from error
        return raw.decode("utf-8", "replace")


def first_file(path: str, places: Iterable[Path]) -> Path | None:
    """The first regular file that a path may lead to from some directories; None: there is none, or the text is no path at all."""
    candidates = [Path(path)] if Path(path).is_absolute() else [place / path for place in places]
    for candidate in candidates:
        try:
            if candidate.is_file():
                return candidate
        except (OSError, ValueError):  # too long, a zero byte
            continue
    return None


def parse(text: str, kind: str, name: str) -> Any:
    """Plain data of YAML, JSON (with comments not allowed) or TOML text.

    Args:
        kind: ``yaml``, ``json`` or ``toml``.
        name: stands in messages.

    Raises:
        DumpFormatError: it is not valid, or too large when its aliases are followed.
    """
    try:
        if kind == "json":
            return parse_json(text)
        if kind == "toml":
            return _toml(text)
        return _yaml(text)
    except DumpFormatError as error:
        raise DumpFormatError(f"{name}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DumpFormatError(f"{name}: not valid {kind.upper()}: {' '.join(str(error).split())[:300]}") from error


def _toml(text: str) -> Any:
    try:
        import tomllib  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found, unused-ignore, no-redef]
    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    documents = [document for document in parse_foreign_yaml(text) if document is not None]
    if len(documents) == 1:
        return documents[0]
    return documents or None


def flat(tree: Any, name: str) -> dict[str, Any]:
    """Dotted keys -> values: lists of plain values are one value, other lists are numbered (``callbacks.0.type``).

    Raises:
        DumpFormatError: more than `MAX_VALUES` values or `MAX_DEPTH` levels.
    """
    out: dict[str, Any] = {}
    seen = 0
    for key, value, count in _leaves(tree, "", 0, name):
        seen += count
        if seen > MAX_VALUES:
            raise DumpFormatError(f"{name}: more than {MAX_VALUES} values; is this a settings file?")
        out[key] = value
    return out


def _leaves(tree: Any, prefix: str, depth: int, name: str) -> Iterator[tuple[str, Any, int]]:
    if depth > MAX_DEPTH:
        raise DumpFormatError(f"{name}: more than {MAX_DEPTH} levels, at {prefix[:60]}...")
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key), depth + 1, name)
    elif isinstance(tree, list) and any(isinstance(item, (dict, list)) and item for item in tree):
        for i, item in enumerate(tree):
            yield from _leaves(item, f"{prefix}.{i}" if prefix else str(i), depth + 1, name)
    elif isinstance(tree, list):
        yield prefix, [_plain(item) for item in tree], len(tree) + 1
    elif prefix:
        yield prefix, _plain(tree), 1


def _plain(value: Any) -> Any:
    """A value as JSON can hold it; texts are bounded."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


_KEYS = {
    "yaml": re.compile(r"(?:^|[{,\s])[\"']?([\w.-]+)[\"']?[ ]*:(?=\s|$)", re.MULTILINE),
    "json": re.compile(r"\"([^\"\n]+)\"\s*:"),
    "toml": re.compile(r"(?:^|[{,])[ \t]*([\w.-]+)[ \t]*=", re.MULTILINE),
}


def lines_of(text: str, kind: str) -> dict[str, int]:
    """Last part of a key -> its line, for those that stand once in the file; good enough to point at."""
    found: dict[str, int] = {}
    twice: set[str] = set()
    line, pos = 1, 0
    for match in _KEYS[kind].finditer(text):
        line += text.count("\n", pos, match.start(1))
        pos = match.start(1)
        if match[1] in found:
            twice.add(match[1])
        found.setdefault(match[1], line)
    return {key: line for key, line in found.items() if key not in twice}


def hosts(text: str) -> dict[str, Any]:
    """A hostfile: number of hosts and of slots (``worker-1 slots=8``, ``host:8``, ``host``)."""
    names, slots = [], 0
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        names.append(words[0].partition(":")[0])
        given = next(
            (word.partition("=")[2] for word in words[1:] if word.startswith(("slots=", "max_slots="))), words[0].partition(":")[2]
        )
        slots += int(given) if given.isdigit() and len(given) < 7 else 0
    out: dict[str, Any] = {"hostfile.hosts": len(set(names))}
    return out | ({"hostfile.slots": slots} if slots else {})
