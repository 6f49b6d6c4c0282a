"""The version matrix: its list, how a run becomes a result, and that results of other versions stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run_matrix
from cell_names import FRAMEWORKS
from packaging.requirements import Requirement
from packaging.version import Version


def test_the_list() -> None:
    """Each row names a framework of the table, tests that are there, and the version that its directory gets."""
    every = run_matrix.rows()
    for row in every.values():
        assert set(row.beside) <= set(every)
        if not row.tests:
            continue
        distribution, version = FRAMEWORKS[row.framework], row.name.rpartition("-")[2]
        requirements = [Requirement(word) for word in row.install if not word.startswith("-")]
        found = [r for r in requirements if r.name == distribution]
        assert not requirements or [str(r.specifier) for r in found] == [f"=={version}"], row.name
        for file, _, function in (test.partition("[")[0].partition("::") for test in row.tests):
            assert (run_matrix.ROOT / file).exists(), row.name
            assert not function or f"\ndef {function}(" in (run_matrix.ROOT / file).read_text(encoding="utf-8"), row.name


def test_bounds() -> None:
    """What the extras ask for is the oldest version that has run, and everything newer that was tried has run too."""
    tomllib = pytest.importorskip("tomllib", reason="came with Python 3.11")
    extras = tomllib.loads((run_matrix.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = {r.name: r.specifier for name, texts in extras.items() if name != "test" for r in map(Requirement, texts)}
    for framework in {row.framework for row in run_matrix.rows().values() if row.tests}:
        tried = {result["version"]: result["status"] for result in run_matrix.kept() if result["framework"] == framework}
        within = {version: status for version, status in tried.items() if version in asked[FRAMEWORKS[framework]]}
        assert within, framework
        assert set(within.values()) == {"ok"}, (framework, within)
        oldest = min(within, key=Version)
        (bound,) = asked[FRAMEWORKS[framework]]
        assert bound.operator == ">="
        assert oldest == bound.version, framework


REPORTS = {
    "ok": ('<testcase name="a"/><testcase name="b"><skipped message="no"/></testcase>', (1, 0, 1), ""),
    "failed": (
        '<testcase name="a"/><testcase name="b"><failure message="assert 1 == 2\n+ more"/></testcase>',
        (1, 1, 0),
        "b: assert 1 == 2 + more",
    ),
    "no checks": ('<testcase name="a"><skipped message="no directory"/></testcase>', (0, 0, 1), "no directory"),
}


@pytest.mark.parametrize("status", REPORTS)
def test_results_of_a_run(tmp_path: Path, status: str) -> None:
    """A test that failed makes the row failed, with its name; a row of which every test was skipped has checked nothing."""
    cases, numbers, why = REPORTS[status]
    (tmp_path / "r.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = run_matrix.counted(tmp_path / "r.xml")
    assert (found["status"], found["why"]) == (status, why)
    assert (found["passed"], found["failed"], found["skipped"]) == numbers
    assert run_matrix.counted(tmp_path / "none.xml")["status"] == "failed"


def test_what_cannot_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that no index has is a result with pip's reason, and its directory is gone."""
    monkeypatch.setattr(run_matrix, "PLACE", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    row = run_matrix.Row("nothing-9", "PyTorch", ("msprobe-no-such-package==9",), (), ("tests",), {})
    result = run_matrix.ran(row, {row.name: row})
    assert result["status"] == "cannot install"
    assert "msprobe-no-such-package" in result["why"]
    assert not row.directory.exists()


def test_results_are_kept_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new result takes the place of the last one of its version, and of no other."""
    monkeypatch.setattr(run_matrix, "RESULTS", tmp_path / "results.json")
    for version, status in (("1", "ok"), ("2", "failed"), ("2", "ok")):
        run_matrix.keep({"framework": "PyTorch", "version": version, "status": status})
    assert [(r["version"], r["status"]) for r in json.loads(run_matrix.RESULTS.read_text())] == [("1", "ok"), ("2", "ok")]
