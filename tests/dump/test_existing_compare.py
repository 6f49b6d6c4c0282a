"""The existing tool's own compare takes our dumps.

Opt-in: MSPROBE_EXISTING_VENV_81 and MSPROBE_EXISTING_VENV_26 name virtual environments that hold its versions 8.1.1 and 26.2.0.
"""

from __future__ import annotations

import os
from pathlib import Path

import existing_tool
import pytest


@pytest.mark.parametrize("kind", ["L0", "L1", "mix"])
@pytest.mark.parametrize(("version", "variable"), [("8.1.1", "MSPROBE_EXISTING_VENV_81"), ("26.2.0", "MSPROBE_EXISTING_VENV_26")])
def test_compare_accepts_our_dump(tmp_path: Path, version: str, variable: str, kind: str) -> None:
    """Our dump of the same data gives the rows that the existing dump gives against itself, as target and as golden, and no error."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} does not name a virtual environment with version {version}")
    figures = existing_tool.check(version, Path(os.environ[variable]), kind, tmp_path)
    assert figures["rows"] > 40
    assert figures["ours_target_stacks"] > 0
