"""A handler of the program's signals may raise while code of the probe runs: the program gets its exception, wherever that is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("interrupted_training.py")
EVERY_LINE = bool(os.environ.get("MSPROBE_EVERY_CELL"))


@pytest.mark.parametrize("mode", ["monitor", "statistics", "tensor"])
def test_an_exception_at_any_line_of_the_probe_reaches_the_program(mode: str) -> None:
    """A sample of the lines that run on the training's thread; all some 6,000 with MSPROBE_EVERY_CELL=1, which takes minutes."""
    count = "1000000" if EVERY_LINE else "60"
    done = subprocess.run([sys.executable, PROGRAM, mode, count], capture_output=True, text=True, timeout=3600)
    assert not done.returncode, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert not found["wrong"]
    assert found["passed"] > 0.8 * found["tried"]
