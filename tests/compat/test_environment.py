"""Which tool a test beside the existing tool runs."""

from __future__ import annotations

import sys
from pathlib import Path

import existing_environment
import pytest


def test_pythonpath_hides_neither_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever PYTHONPATH names, ours is that of this checkout and the other that of its own environment; where it would be another,
    nothing is run."""
    (tmp_path / "msprobe").mkdir()
    (tmp_path / "msprobe" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert existing_environment.environment_of(sys.executable)["PYTHONPATH"] == str(existing_environment.ROOT)
    environment = tmp_path / "venv"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(AssertionError, match=f"would import msprobe from {tmp_path / 'msprobe'}"):
        existing_environment.environment_of(python)
    (tmp_path / "msprobe").rename(environment / "msprobe")
    python.write_text(f'#!/bin/sh\nPYTHONPATH=${{PYTHONPATH:-{environment}}} exec {sys.executable} "$@"\n')
    assert "PYTHONPATH" not in existing_environment.environment_of(python)
