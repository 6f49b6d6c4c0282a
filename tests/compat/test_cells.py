"""Every cell of task x level x summary mode x ranks, and the variants, against the existing tool.

Opt-in: MSPROBE_EXISTING_VENV_81 and MSPROBE_EXISTING_VENV_26 name virtual environments that hold its versions 8.1.1 and 26.2.0.
MSPROBE_COMPAT_CACHE may name a directory that keeps what they wrote.
"""

from __future__ import annotations

import pytest
from cells import Cell
from results import CELLS, result
from rules import RULES

pytestmark = pytest.mark.framework


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("version", "cell"), CELLS, ids=[f"{version}-{cell}" for version, cell in CELLS])
def test_cell_matches(version: str, cell: Cell) -> None:
    """Record for record the same names, order, shapes, dtypes, statistics, checksums, files, stacks and parents; each difference has
    a rule of docs/compatibility.md."""
    found = result(version, cell)
    print(
        version, cell, f"{found.equal} equal, {found.explained} explained of {found.records}; tensors {found.tensors};", dict(found.rules)
    )
    assert found.unexplained == []
    assert found.equal + found.explained == found.records
    expected_empty = cell.variant == "one_step"  # rank 1 only; the other has no directory
    assert found.records > 0 or expected_empty
    assert (found.tensors > 0) == (cell.task == "tensor" or cell.variant == "tensor_list")


@pytest.mark.timeout(900)
def test_no_rule_is_stale() -> None:
    """Every documented difference occurs in some cell."""
    used = {rule for version, cell in CELLS for rule in result(version, cell).rules}
    assert used == {rule.id for rule in RULES}
