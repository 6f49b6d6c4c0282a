"""SECURITY.md names a test for each promise: the files and functions are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_promise_has_a_test() -> None:
    """Each row of the table names at least one file of tests that exists, and each test function is in it."""
    rows = [line for line in (ROOT / "SECURITY.md").read_text().partition("## Promises")[2].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        files = re.findall(r"`(tests/[^`]+)`", row)
        assert files, row
        assert [name for name in files if not (ROOT / name).exists()] == [], row
        sources = [path.read_text() for name in files for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).glob("*.py"))]
        for function in re.findall(r"`(test_\w+)`", row):
            assert any(f"def {function}(" in source for source in sources), function
