"""Settings files as plain data: YAML and JSON with duplicate keys refused. Nothing in a file is ever executed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import SettingsError, UnreadableSettingsError
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.json_text import parse_json, unique_keys
from msprobe_engine.core.io.regular_files import OddFileError
from msprobe_engine.core.io.yaml_text import parse_yaml

MAX_BYTES = 1 << 20
_OF_THE_NAME = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors that a mistyped name has on every machine."""
SUFFIXES = (".yaml", ".yml", ".json")


def read_raw(path: Path) -> bytes:
    """The bytes of a settings file; waits for nobody: a pipe would keep the training waiting for whoever writes to it.

    Raises:
        UnreadableSettingsError: the file is there, and the machine or its rights do not let it be read.
        SettingsError: the file is missing, no regular file, or too large (1 MiB).
    """
    try:
        with open_input(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except OddFileError as error:
        raise SettingsError(f"{path}: is no regular file ({error.strerror}); a settings file is one") from error
    except OSError as error:
        kind = SettingsError if error.errno in _OF_THE_NAME else UnreadableSettingsError
        raise kind(f"{path}: the settings file cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_BYTES:
        raise SettingsError(f"{path}: larger than {MAX_BYTES} bytes; a settings file is small, is this another kind of file?")
    return raw


def read_file(path: Path) -> Any:
    """The content of a settings file.

    Raises:
        SettingsError: the file is missing, too large (1 MiB), of another kind, or not valid YAML or JSON.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SettingsError(f"{path}: a settings file ends in {', '.join(SUFFIXES)}; this one ends in '{path.suffix}'")
    return parse(read_raw(path), path)


def parse(raw: bytes, path: Path) -> Any:
    """Plain data of the bytes of a settings file; `path` gives the format and stands in messages.

    Raises:
        SettingsError: not valid YAML or JSON.
    """
    is_json = path.suffix.lower() == ".json"
    try:
        text = raw.decode("utf-8-sig")
        return parse_json(text, unique_keys) if is_json else parse_yaml(text)
    except ValueError as error:
        raise SettingsError(f"{path}: not valid {'JSON' if is_json else 'YAML'}: {error}") from error
