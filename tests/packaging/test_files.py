"""Files that a release needs."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_licence_is_complete() -> None:
    """LICENSE holds the whole Apache licence 2.0."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "APPENDIX: How to apply the Apache License to your work" in text


def test_every_package_is_typed() -> None:
    """Each import package carries the marker of PEP 561."""
    for package in ("msprobe", "msprobe_engine", "msprobe_integrations"):
        assert (ROOT / package / "py.typed").is_file()


def test_ci_is_runnable() -> None:
    """.ci/run can be executed, stops at errors and calls make test."""
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    text = run.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert "make test" in text


def test_yaml_files_of_the_repository_are_valid() -> None:
    """Every YAML file in examples and deploy is YAML."""
    for folder in ("examples", "deploy"):
        for path in (ROOT / folder).rglob("*.y*ml"):
            assert list(yaml.safe_load_all(path.read_text(encoding="utf-8"))), path
