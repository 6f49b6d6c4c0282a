"""Mapping files: read as plain data, and written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json, unique_keys
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.yaml_text import parse_yaml

LARGEST = 1 << 30
"""Bytes of a mapping file; the existing tool's limit for YAML."""


def read_mapping(source: Any, what: str) -> Any:
    """Content of a mapping: a file's (YAML or JSON), or the mapping itself when one is given in place of a path.

    Raises:
        UsageError: it cannot be read, or is no mapping and no list.
    """
    if isinstance(source, (str, Path)):
        source = _file(Path(source), what)
    if source is None:
        return {}
    if not isinstance(source, (Mapping, list)):
        raise UsageError(f"compare: the {what} is a {type(source).__name__}; a path, a mapping or (api mapping) a list is allowed")
    return source


def _file(path: Path, what: str) -> Any:
    try:
        text = read_input(path, LARGEST).decode("utf-8-sig")
        return parse_json(text, unique_keys) if path.suffix.lower() == ".json" else parse_yaml(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"compare: the {what} {path} cannot be read: {error}") from error


def texts(mapping: Any, what: str) -> dict[str, str]:
    """A mapping of names to names.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(mapping, Mapping):
        raise UsageError(f"compare: the {what} is a {type(mapping).__name__}; a mapping of names to names is needed")
    for key, value in mapping.items():
        if isinstance(value, (Mapping, list)) or value is None:
            raise UsageError(f"compare: the {what} maps {str(key)[:120]!r} to a {type(value).__name__}; a name is needed")
    return {str(key): str(value) for key, value in mapping.items()}


def write_mapping(path: Path, mapping: Mapping[str, str]) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written; nothing partial stays.
    """
    text = yaml.safe_dump(dict(mapping), allow_unicode=True, sort_keys=False, width=4096)
    write_file(path, [text.encode("utf-8", "surrogatepass")])
