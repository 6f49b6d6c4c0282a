"""docs/integrations.md: made of the kept cells, without a blank, and its tests exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import cells_file
import not_run
import pytest
import table_page
from cells_file import Cell, Row

ROOT = Path(__file__).parents[3]
DDP, FSDP = Row("PyTorch", "2.13.0", "DDP, 2 ranks"), Row("PyTorch", "2.13.0", "FSDP2, 2 ranks")


def cell(row: Row, feature: str, test: str = "tests/a/test_a.py::test_a") -> Cell:
    return Cell(row, feature, ("2.13.0",), ("3.11",), (test,))


def reason(layout: str = "*", features: tuple[str, ...] = table_page.FEATURES, **keys: str | None) -> not_run.Reason:
    fields = {"framework": "PyTorch", "version": None, "status": "not supported", "why": "because", **keys}
    return not_run.Reason(fields["framework"], fields["version"], (layout,), features, fields["status"], fields["why"])  # type: ignore[arg-type]


def test_the_page_is_made_of_the_kept_cells() -> None:
    """The page in docs is what the kept cells, the reasons and the results give; no cell of a row is blank."""
    text = table_page.page(cells_file.read(), not_run.read(), table_page.results())
    assert table_page.PAGE.read_text(encoding="utf-8") == text, "run make integrations-table, or tests/integrations/table/make_table.py"
    assert not re.findall(r"\| *\|", text)


def test_tests_of_the_table_exist() -> None:
    """A cell whose test was renamed or removed is proven by nothing."""
    for test in {test for one in cells_file.read() for test in one.tests}:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_a_blank_is_an_error() -> None:
    """A cell of a row that has neither run nor a reason is named, and there is no page."""
    with pytest.raises(table_page.Blank, match=r"PyTorch / 2\.13\.0 / DDP, 2 ranks / dump L1"):
        table_page.page([cell(DDP, "dump L0")], [], [])


def test_a_reason_beside_a_run_is_an_error() -> None:
    """What has run is not called unsupported by a row that names the cell; rows for all are for what is left."""
    with pytest.raises(ValueError, match=r"but it ran: tests/a/test_a\.py::test_a"):
        table_page.page([cell(DDP, "dump L0")], [reason(DDP.layout, ("dump L0",))], [])
    text = table_page.page([cell(DDP, "dump L0")], [reason()], [])
    assert "| 2.13.0 | DDP, 2 ranks | ran (1) | no (a) |" in text
    text = table_page.page([cell(DDP, "dump L0")._replace(compared=False)], [reason()], [])
    assert "| 2.13.0 | DDP, 2 ranks | ran* (1) | no (a) |" in text


def test_rows_that_only_the_reasons_name() -> None:
    """A layout that never ran is a row as well; the first reason that fits counts; older versions have one of their own."""
    old = Row("PyTorch", "2.4.1", "DDP, 2 ranks")
    reasons = [
        reason(FSDP.layout, why="one"),
        reason(version="other", status="not run here", why="two"),
        reason(why="three"),
    ]
    text = table_page.page([cell(DDP, "dump L1"), cell(old, "dump L1")], reasons, [])
    assert "| 2.13.0 | FSDP2, 2 ranks | no (b) |" in text
    assert "| 2.13.0 | DDP, 2 ranks | no (a) | ran (1) |" in text
    assert "| 2.4.1 | DDP, 2 ranks | not here (c) | ran (1) |" in text
    for line in ("* (a) not supported: three", "* (b) not supported: one", "* (c) not run here: two"):
        assert line in text


def test_notes_become_cells(tmp_path: Path) -> None:
    """Notes of all processes come together per cell; one that has run again takes the place of the kept one, the others
    stay as long as one of their tests is there."""
    note = {
        **DDP._asdict(),
        "compared": True,
        "torch": "2.13.0",
        "python": "3.11",
        "feature": "dump L0",
        "test": "tests/a/test_a.py::test_a[ddp]",
    }
    (tmp_path / "cells-1.jsonl").write_text(json.dumps(note) + "\n" + json.dumps({**note, "test": "tests/a/test_a.py::test_a[x]"}) + "\n")
    weak = [{**note, "compared": False, "feature": feature} for feature in ("dump L0", "grad probe")]
    (tmp_path / "cells-2.jsonl").write_text("".join(json.dumps(n) + "\n" for n in ({**note, "feature": "same bits"}, *weak)))
    new = cells_file.gathered(tmp_path)
    tests = ("tests/a/test_a.py::test_a",)
    proven = {("dump L0", tests, True), ("same bits", tests, True), ("grad probe", tests, False)}
    assert {(c.feature, c.tests, c.compared) for c in new} == proven
    old = Row("PyTorch", "2.4.1", "DDP, 2 ranks")
    (tmp_path / "tests" / "a").mkdir(parents=True)
    (tmp_path / "tests" / "a" / "test_a.py").write_text("def test_ab(): ...\ndef test_a(): ...\n")
    gone, moved = "tests/a/test_a.py::test_b", "tests/b/test_b.py::test_a"
    before = [cell(old, "dump L1"), cell(DDP, "dump L0", gone), cell(DDP, "dump L1", gone), cell(FSDP, "dump L0", moved)]
    before.append(cell(DDP, "dump mix")._replace(tests=(*tests, gone)))
    kept = cells_file.merged(before, new, tmp_path)
    assert [(c.row.version, c.feature) for c in kept] == [
        ("2.13.0", "dump L0"),
        ("2.13.0", "dump mix"),
        ("2.13.0", "grad probe"),
        ("2.13.0", "same bits"),
        ("2.4.1", "dump L1"),
    ]
    assert {c.tests for c in kept} == {tests}
    cells_file.write(kept, tmp_path / "cells.jsonl")
    assert cells_file.read(tmp_path / "cells.jsonl") == kept


@pytest.mark.parametrize(
    "row", ["{framework: X, layout: a, features: all, status: not supported, why: w}", "{framework: PyTorch, layout: a}"]
)
def test_wrong_reasons(tmp_path: Path, row: str) -> None:
    """A row of not_run.yaml that fits nothing is an error with its number."""
    (tmp_path / "not_run.yaml").write_text(f"- {row}\n")
    with pytest.raises(ValueError, match=r"row 1 of not_run\.yaml"):
        not_run.read(tmp_path / "not_run.yaml")
