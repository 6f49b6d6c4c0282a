"""A training whose operator fails while a dump is taken ends as it would without the dump."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("failing_training.py")


def _run(*arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("how", "error"), [("unused", "RuntimeError Cholesky expects"), ("outside", "ValueError For 'TensorScatterUpdate'")]
)
def test_the_training_ends_as_it_would(how: str, error: str) -> None:
    """Type and text of the error are those without a capture, also of a result that nobody looks at; the capture's own guard is not told,
    and what was seen before is there."""
    (plain,) = _run(how, "none")
    assert plain.startswith(error)
    watched, seen = _run(how, "mix")
    assert watched == plain
    assert seen.startswith("{} [")
    assert "'Cell.first.Dense.forward.0'" in seen
