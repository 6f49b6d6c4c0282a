"""Cells so deep in each other that the bare program needs nearly all of Python's limit of recursion train with the probe, too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ms_programs
import pytest

PROGRAM = Path(__file__).parents[1] / "nested_cells.py"
DEPTH = 320
"""The bare program trains at it with the limit of 1000; seen through a patch without more room nothing deeper than 200 did."""


def train(kind: str) -> dict[str, Any]:
    """What the program printed."""
    done = ms_programs.run(PROGRAM, kind, DEPTH, check=True)
    found: dict[str, Any] = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"loss"'))
    return found


@pytest.fixture(scope="module")
def bare() -> dict[str, Any]:
    """Without the probe."""
    return train("bare")


@pytest.mark.skipif(sys.version_info[:2] > (3, 11), reason="how deep the bare program gets is that of Python 3.10 and 3.11")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["L0", "both", "mix", "monitor"])
def test_cells_that_train_without_the_probe_train_with_it(kind: str, bare: dict[str, Any]) -> None:
    """No step is lost, nothing is switched off, and the limit of the program is back where hooks do not stay on."""
    seen = train(kind)
    assert seen["loss"] == bare["loss"]
    assert not seen["said"]
    before, *_, after = seen["limits"]
    if kind == "monitor":  # hooks of a dump stay on
        assert before == after
