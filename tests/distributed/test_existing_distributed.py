"""Distributed records of the same script under this project and under the existing tool 26.2.0, record by record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import existing_distributed
import existing_environment
import existing_tool
import pytest

pytestmark = [pytest.mark.framework, pytest.mark.existing_tool]

OTHER = {
    # its record: why ours differs
    "Distributed.all_gather_into_tensor.1.forward": "a buffer that is only written to is null when given by keyword, too",
    "Distributed.batch_isend_irecv.0.forward": "receive buffers have no values before, and those that arrived after",
    "Distributed.all_reduce.6.forward": "nobody waited: it writes the values from before, here those that were there at the end",
    "Distributed.isend.0.forward": "it notes arguments that torch filled in",
    "Distributed.irecv.0.forward": "it notes arguments that torch filled in",
}
SECTIONS = ("input_args", "input_kwargs", "output")


def records(dump: Path, rank: int) -> dict[str, Any]:
    data = json.loads((dump / "step0" / f"rank{rank}" / "dump.json").read_text())["data"]
    return {name: record for name, record in data.items() if name.startswith("Distributed.")}


def first_lines(dump: Path, rank: int) -> dict[str, str]:
    stacks = json.loads((dump / "step0" / f"rank{rank}" / "stack.json").read_text())
    return {name: lines[0] for names, lines in stacks.values() for name in names if name.startswith("Distributed.")}


def test_records_of_both(tmp_path: Path) -> None:
    """Names, null places, arguments, group ids, statistics and the line that called are those of the existing tool, but for the records
    listed in `OTHER` and the bytes of object collectives; its compare takes both dumps."""
    existing = existing_environment.existing_tool("26.2.0")
    ours = existing_distributed.run(sys.executable, tmp_path / "ours")
    theirs = existing_distributed.run(existing.python, tmp_path / "theirs")
    for rank in range(2):
        mine, other = records(ours, rank), records(theirs, rank)
        assert [name for name in other if name not in mine] == ["Distributed.all_gather.1.forward", "Distributed.all_gather.2.forward"]
        assert [name for name in mine if name not in other] == []
        differ = {name for name in mine if not all(existing_distributed.same(mine[name][s], other[name][s]) for s in SECTIONS)}
        assert differ <= set(OTHER), {name: (mine[name], other[name]) for name in differ - set(OTHER)}
        assert "Distributed.batch_isend_irecv.0.forward" in differ
        lines = first_lines(theirs, rank)
        assert {name: line for name, line in first_lines(ours, rank).items() if lines[name] != line} == {}
    files = [root / "step0/rank0/dump.json" for root in (ours, theirs)]
    sheet = existing_tool.compare("26.2.0", existing.directory, *files, tmp_path / "sheet")
    matched = [row for row in sheet if row["NPU Name"].startswith("Distributed.") and row["Bench Name"] not in ("N/A", "")]
    assert len(matched) > 40
