"""Every cell of net x task x level x summary mode, and the variants, against the existing tool on MindSpore.

Opt-in: MSPROBE_EXISTING_MS_81 and MSPROBE_EXISTING_MS_26 name virtual environments that hold mindspore and its versions 8.1.1 and 26.2.0.
MSPROBE_COMPAT_CACHE may name a directory that keeps what they wrote.
"""

from __future__ import annotations

import pytest
from ms_cells import Cell
from ms_results import CELLS, result
from ms_rules import RULES

pytestmark = pytest.mark.framework


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("version", "cell"), CELLS, ids=[f"{version}-{cell}" for version, cell in CELLS])
def test_cell_matches_on_mindspore(version: str, cell: Cell) -> None:
    """Record for record the same names, order, places, types, dtypes, shapes, statistics, checksums, files, stacks and parents; each
    difference has a rule of docs/compatibility.md."""
    found = result(version, cell)
    assert found.unexplained == []
    assert found.equal + found.explained == found.records
    assert found.records > 0
    assert (found.tensors > 0) == (cell.task == "tensor" or cell.variant == "tensor_list")


@pytest.mark.timeout(1200)
def test_no_rule_on_mindspore_is_stale() -> None:
    """Every documented difference occurs in some cell."""
    used = {rule for version, cell in CELLS for rule in result(version, cell).rules}
    assert used == {rule.id for rule in RULES}
