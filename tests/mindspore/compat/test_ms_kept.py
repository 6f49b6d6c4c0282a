"""The same comparison as test_ms_cells.py where the existing tool is not installed: against its dumps of some cells, kept as fixtures.

Our side is run here. Another machine may round otherwise, so numbers of floating point tensors need agree only to 1e-4 of the
tensor's size, and their checksums only in form.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import ms_cells
import pytest
from kept import unpack
from matching import Difference, differences, load, same_number
from ms_cells import Cell
from ms_kept import KEPT, file_of
from ms_rules import Context, explain

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
    context = Context(cell, version, mine, theirs)
    found = [d for d in differences(mine, theirs) if not _other_machine(d) and explain(d, context) is None]
    assert [str(d) for d in found] == []
    assert len(theirs.data) > 5 or cell.task == "structure"


def _other_machine(d: Difference) -> bool:
    """Can this difference come from another processor?"""
    tensor = d.whole[1]
    if not isinstance(tensor, dict) or not re.match(r"B?Float|Complex", tensor["dtype"]):
        return False
    if d.kind == "checksum":
        return isinstance(d.ours, str) and isinstance(d.theirs, str) and len(d.ours) == len(d.theirs)
    norm = tensor.get("Norm")
    return d.kind == "value" and same_number(d.ours, d.theirs, 1e-4, abs(norm) if isinstance(norm, float) and math.isfinite(norm) else 0.0)
