"""The fixture `cells`: only what a test that passed has named is in the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cell_notes import Cells

TESTS = """
import os

def test_passes(cells):
    cells.ran("PyTorch", "1 rank", "dump L0", "same bits")

def test_fails(cells):
    cells.ran("PyTorch", "1 rank", "dump L1")
    assert False

def test_no_such_feature(cells):
    cells.ran("PyTorch", "1 rank", "dump L9")

def test_forks(cells):
    child = os.fork()
    if not child:
        try:
            cells.ran("PyTorch", "2 ranks", "dump L1")
        except RuntimeError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3

def test_another_version(cells):
    cells.ran("Megatron", "TP 2", "same bits", version="0.19.2")
"""


def test_only_passed_tests_are_noted(tmp_path: Path) -> None:
    """Cells of a failed test, of an unknown name and of a forked rank are not written; what passes is, with versions and the test's id."""
    (tmp_path / "conftest.py").write_text("from cell_notes import cells, pytest_runtest_makereport\n")
    (tmp_path / "test_generated_cells.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "MSPROBE_TABLE": str(tmp_path / "notes"), "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "no feature 'dump L9' in the table; there are dump L0" in done.stdout
    lines = [json.loads(line) for file in (tmp_path / "notes").iterdir() for line in file.read_text().splitlines()]
    assert [(r["framework"], r["layout"], r["feature"]) for r in lines] == [
        ("PyTorch", "1 rank", "dump L0"),
        ("PyTorch", "1 rank", "same bits"),
        ("Megatron", "TP 2", "same bits"),
    ]
    assert lines[2]["version"] == "0.19.2"
    assert lines[0]["test"] == "test_generated_cells.py::test_passes"
    assert lines[0]["version"] == lines[0]["torch"]
    assert lines[0]["python"] == ".".join(map(str, sys.version_info[:2]))


def test_names_are_checked_without_a_table(cells: Cells) -> None:
    """A wrong name is an error in every run, not only when the table is made."""
    with pytest.raises(ValueError, match="no framework 'Pytorch'"):
        cells.ran("Pytorch", "1 rank", "dump L0")
    with pytest.raises(ValueError, match="no feature named"):
        cells.ran("PyTorch", "1 rank")
    with pytest.raises(ValueError, match="the layout has no name"):
        cells.ran("PyTorch", " ", "dump L0")
    with pytest.raises(LookupError, match="version="):
        cells.ran("MindSpeed", "TP 2", "dump L0")
