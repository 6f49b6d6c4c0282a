"""Reads shapes.json: the records of a structure dump, whose dump.json has none.

``{"rows": [0, 1, 0, ...], "data": {record: as in dump.json, statistics null}}``; ``rows`` has a number per tensor in their order, -1
where there was nothing to read, and equal numbers mean the same tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.notebook.step_dump import EntryParser, StepDump
from msprobe_engine.formats.dump.rank_files import parse_object, read_bytes


def with_shapes(dump: StepDump) -> tuple[StepDump, list[int] | None]:
    """A structure dump with the records of its shapes.json, and the row of each of their tensors.

    Raises:
        UsageError: there is no shapes.json: the existing tool wrote it, or an earlier version of this one.
        DumpFormatError: it is damaged.
    """
    file = dump.directory / layout.SHAPES
    if not file.exists():
        raise UsageError(
            f"{dump.directory}: task 'structure' of the existing tool writes names and no shapes, so sizes are not known; "
            "give a dump of task statistics, or a structure dump of this tool"
        )
    document = parse_object(read_bytes(file), file)
    data = document.get("data")
    if not isinstance(data, dict):
        raise DumpFormatError(f"{file}: key 'data' is missing or no JSON object; the file is damaged")
    rows: Any = document.get("rows")
    valid = isinstance(rows, list) and all(isinstance(row, int) and -1 <= row < 1 << 40 for row in rows)
    known = valid and any(row >= 0 for row in rows)
    parser = EntryParser(str(file), dump.stacks, dump.construct, dump.header)
    return replace(dump, entries={name: parser.entry(name, value) for name, value in data.items()}), rows if known else None
