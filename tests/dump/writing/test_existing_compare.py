"""The existing tool's own compare takes our dumps."""

from __future__ import annotations

from pathlib import Path

import existing_environment
import existing_tool
import pytest


@pytest.mark.parametrize("kind", ["L0", "L1", "mix"])
@pytest.mark.existing_tool
@pytest.mark.parametrize("version", existing_environment.VERSIONS)
def test_compare_accepts_our_dump(tmp_path: Path, version: str, kind: str) -> None:
    """Our dump of the same data gives the rows that the existing dump gives against itself, as target and as golden, and no error."""
    figures = existing_tool.check(version, existing_environment.existing_tool(version).directory, kind, tmp_path)
    assert figures["rows"] > 40
    assert figures["ours_target_stacks"] > 0
