"""What somebody who packs or changes the project gets."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

BESIDE = ("tests", "benchmarks", "docs", "examples", "deploy")
HOOKS = (
    *("build_wheel", "build_sdist", "build_editable", "prepare_metadata_for_build_wheel", "prepare_metadata_for_build_editable"),
    *("get_requires_for_build_wheel", "get_requires_for_build_sdist", "get_requires_for_build_editable"),
)


@pytest.mark.slow
def test_tests_and_pages_are_in_it(source_distribution: Path, tree: Path) -> None:
    """Every file of the directories beside the packages, and nothing that was compiled."""
    with tarfile.open(source_distribution) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(path.relative_to(tree)) for folder in BESIDE for path in (tree / folder).rglob("*") if path.is_file()}
    assert {"tests/conftest.py", "docs/guide/dump.md"} <= wanted
    assert wanted - names == set()
    assert {"Makefile", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "setup.py", "noxfile.py", "package-lock.json"} <= names
    assert not [name for name in names if name.endswith((".pyc", ".so"))]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_old_setuptools_is_named(hook: str, tree: Path, tmp_path: Path) -> None:
    """Without build isolation an old setuptools would fail with an error about the license; what is needed is said instead."""
    code = (
        "import sys, setuptools; setuptools.__version__ = '70.1.0'; sys.path.insert(0, 'build_support'); import wheel_with_pth as b; "
        f"b.{hook}({'' if hook.startswith('get_') else repr(str(tmp_path))})"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "setuptools 77 or later, and 70.1.0 is installed here: run 'pip install \"setuptools>=77\"'" in run.stderr
    assert "Traceback" not in run.stderr
