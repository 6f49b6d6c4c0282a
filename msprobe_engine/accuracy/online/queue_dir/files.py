"""Files of a step in the spool: records as they came, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.online import messages
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.formats.dump import layout

_REMEMBERED = 64
MOST_BYTES = 1 << 30
"""Of a file of the spool other than tensors: the records of one message."""


@lru_cache(maxsize=_REMEMBERED)
def document(path: str, _session: str) -> Any:
    """What came with one message; of another session it is another file.

    Raises:
        OSError: it is gone.
    """
    return read_document(Path(path))


def read_document(path: Path) -> Any:
    """The JSON of a file of the spool. A link, a pipe and the like are refused: several people may write where a spool is.

    Raises:
        OSError: it cannot be read.
        TextError: it is no JSON.
    """
    return parse_json(read_file(path), levels=messages.MAX_DEPTH)


def read_file(path: Path) -> bytes:
    """A file of the spool; see `read_document`."""
    return read_input(path, MOST_BYTES, follow=False)


def data_names_in(node: Any) -> Iterator[str]:
    """The ``data_name`` of every tensor in a record."""
    if isinstance(node, dict):
        name = node.get("data_name")
        if isinstance(name, str):
            yield name
        for child in node.values():
            yield from data_names_in(child)
    elif isinstance(node, list):
        for child in node:
            yield from data_names_in(child)


def bases(records: Mapping[str, Any]) -> list[str]:
    """Names of the calls that these records are of, each once."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in records))


def number_of(path: Path) -> int:
    """Number of the message whose records are in this file."""
    return int(path.name.removeprefix(".calls-").removesuffix(".json"))


def dump_text(data_directory: str, records: Mapping[str, Any]) -> bytes:
    """A ``dump.json`` of records whose step has no end: laid out as `msprobe_engine.formats.dump.stream` wants it, a record in one line."""
    header = {
        "task": "tensor", "level": "L1", "framework": "pytorch",
        "dump_data_dir": data_directory, "tensor_format": "packed", "complete": False,
    }  # fmt: skip
    head = json.dumps(header, indent=1).removesuffix("\n}")
    lines = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(record)}" for name, record in records.items())
    return f'{head},\n "data": {{\n  {lines}\n }}\n}}'.encode()


def parse_not_saved(text: memoryview | None) -> list[Any]:
    """The list in a ``not_saved.json``; empty when there is none.

    Raises:
        DumpFormatError: it is damaged.
    """
    if text is None:
        return []
    try:
        calls = parse_json(bytes(text))["not_saved"]
    except (ValueError, KeyError, TypeError):
        raise DumpFormatError(f"{layout.NOT_SAVED} of a step is damaged") from None
    if not isinstance(calls, list):
        raise DumpFormatError(f"{layout.NOT_SAVED} of a step is damaged")
    return calls
