"""Settings files as plain data: YAML and JSON with duplicate keys refused. Nothing in a file is ever executed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from msprobe_engine.errors import SettingsError

MAX_BYTES = 1 << 20
SUFFIXES = (".yaml", ".yml", ".json")
_MOST_MERGED = 100_000
"""Keys that ``<<`` may copy; a few lines that merge each other would make millions."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader of PyYAML; it would keep the last of two equal keys without a word, and copy merged mappings without an end."""

    merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self.merged += len(node.value)
        if self.merged > _MOST_MERGED:
            mark = node.start_mark
            raise yaml.constructor.ConstructorError(None, None, f"more than {_MOST_MERGED} keys when merged mappings are followed", mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            try:
                repeated = key in seen
                seen.add(key)
            except TypeError:
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain value", key_node.start_mark) from None
            if repeated:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} appears twice", key_node.start_mark)
        return super().construct_mapping(node, deep)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {key!r} appears twice")
        out[key] = value
    return out


def parse_yaml(text: str) -> Any:
    """YAML text as plain data."""
    return yaml.load(text, Loader=_UniqueKeyLoader)


def parse_json(text: str) -> Any:
    """JSON text (NaN and Infinity allowed) as plain data."""
    return json.loads(text, object_pairs_hook=_unique)


def open_file(path: Path) -> BinaryIO:
    """A settings file for reading; waits for nobody: a pipe would keep the training waiting for whoever writes to it.

    Raises:
        OSError: it cannot be opened.
        SettingsError: it is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SettingsError(f"{path}: is no regular file (a directory, a pipe, a device); a settings file is one")
    return os.fdopen(fd, "rb")


def read_file(path: Path) -> Any:
    """The content of a settings file.

    Raises:
        SettingsError: the file is missing, too large (1 MiB), of another kind, or not valid YAML or JSON.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SettingsError(f"{path}: a settings file ends in {', '.join(SUFFIXES)}; this one ends in '{path.suffix}'")
    try:
        with open_file(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"{path}: the settings file cannot be read: {reason}") from error
    if len(raw) > MAX_BYTES:
        raise SettingsError(f"{path}: larger than {MAX_BYTES} bytes; a settings file is small, is this another kind of file?")
    return parse(raw, path)


def parse(raw: bytes, path: Path) -> Any:
    """Plain data of the bytes of a settings file; `path` gives the format and stands in messages.

    Raises:
        SettingsError: not valid YAML or JSON.
    """
    is_json = path.suffix.lower() == ".json"
    try:
        text = raw.decode("utf-8-sig")
        return parse_json(text) if is_json else parse_yaml(text)
    except Exception as error:  # PyYAML lets ValueError, IndexError, AttributeError, RecursionError through on damaged input
        raise SettingsError(f"{path}: not valid {'JSON' if is_json else 'YAML'}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem or error.context} (line {mark.line + 1}, column {mark.column + 1})"
    if isinstance(error, json.JSONDecodeError):
        where, before = f"(line {error.lineno}, column {error.colno})", error.doc[: error.pos].rstrip()
        if not error.doc.strip():
            return "the file is empty"
        if before.endswith(",") and error.doc[error.pos :].lstrip()[:1] in ("}", "]"):
            return f"a comma stands before the closing {error.doc[error.pos :].lstrip()[0]} {where}; take it away"
        return f"{error.msg} {where}"
    return " ".join(str(error).split()) or type(error).__name__
