"""The same comparison as test_ms_cells.py where the existing tool is not installed: against its dumps of some cells, kept as fixtures.

Our side is run here. Another machine may round otherwise, so numbers of floating point tensors need agree only as far as `machines`
says, and their checksums only in form.
"""

from __future__ import annotations

from pathlib import Path

import ms_cells
import pytest
from kept import unpack
from machines import rounds_otherwise
from matching import differences, load
from ms_cells import Cell
from ms_kept import KEPT, file_of
from ms_rules import Context, explain

FLOATING = r"B?Float|Complex"
CASES = [(version, *case) for version, cases in KEPT.items() for case in cases]


@pytest.fixture(scope="module")
def ours() -> Path:
    """Our dumps of all cells that are kept."""
    return ms_cells.ours(tuple(dict.fromkeys(cell for _, cell, _ in CASES)))


@pytest.mark.framework
@pytest.mark.parametrize(("version", "cell", "step"), CASES, ids=[f"{v}-{c}-step{s}" for v, c, s in CASES])
def test_our_mindspore_dump_matches_the_kept_one(ours: Path, version: str, cell: Cell, step: int) -> None:
    """Record for record, each difference with a rule of docs/compatibility.md."""
    mine = load(ms_cells.rank_directories(ours, cell, step)[0])
    theirs = unpack(file_of(version, cell, step).read_text())
    context = Context(cell, version, mine, theirs, other_machine=True)
    found = [d for d in differences(mine, theirs) if not rounds_otherwise(d, theirs, FLOATING) and explain(d, context) is None]
    assert [str(d) for d in found] == []
    assert len(theirs.data) > 5 or cell.task == "structure"
