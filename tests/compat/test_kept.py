"""The same comparison as test_cells.py where the existing tool is not installed: against its dumps of some cells, kept as fixtures.

Our side is run here. Another machine may round otherwise, so numbers of floating point tensors need agree only as far as `machines`
says, and their checksums only in form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cells
import pytest
from cells import Cell
from hypothesis import given
from hypothesis import strategies as st
from kept import KEPT, RUN, file_of, pack, unpack
from machines import rounds_otherwise
from matching import RankDump, differences, load
from rules import Context, explain

FLOATING = r"torch\.(b?float|complex)"
CASES = [(version, *case) for version, cases in KEPT.items() for case in cases]


@pytest.fixture(scope="module")
def ours() -> Path:
    """Our dumps of all cells that are kept."""
    return cells.ours(RUN)


@pytest.mark.framework
@pytest.mark.parametrize(("version", "cell", "step", "rank"), CASES, ids=[f"{v}-{c}-step{s}-rank{r}" for v, c, s, r in CASES])
def test_our_dump_matches_the_kept_one(ours: Path, version: str, cell: Cell, step: int, rank: int) -> None:
    """Record for record, each difference with a rule of docs/compatibility.md."""
    mine = load(cells.rank_directories(ours, cell, step)[rank])
    theirs = unpack(file_of(version, cell, step, rank).read_text())
    context = Context(cell, version, mine, theirs)
    found = [d for d in differences(mine, theirs) if not rounds_otherwise(d, theirs, FLOATING) and explain(d, context) is None]
    assert [str(d) for d in found] == []
    assert len(theirs.data) > 5 or cell.task == "structure"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.dictionaries(st.text(), values, max_size=4), stacks=st.dictionaries(st.text(), st.lists(st.text(), max_size=3), max_size=4))
def test_what_is_kept_is_what_was_there(data: dict[str, Any], stacks: dict[str, list[str]]) -> None:
    """Packing loses nothing."""
    dump = RankDump({"task": "tensor"}, data, stacks, {"a": None}, ["dump.json"], ["x.pt"])
    again = unpack(pack(dump))
    assert again == dump
    assert list(again.data) == list(data)
