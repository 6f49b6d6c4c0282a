"""Models whose modules lie so deep in each other that the bare program needs nearly all of Python's limit of recursion.

The rule: wherever the bare program trains, it trains with the probe, everything is recorded, and the limit is the program's own when
hooks are off. Where the program leaves no room, by setting the limit itself while hooks are on, the part of the probe that met the limit is
off with one message, and the training goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("nested_model.py")
DEPTH = 240
"""The bare program trains at it (it dies near 248 with the limit of 1000), with empty hooks of torch's it does not (near 198)."""


def train(kind: str, depth: int, room: int = 0) -> dict[str, Any] | None:
    """What the program printed; None where it died of a RecursionError."""
    given = [str(room)] if room else []
    done = subprocess.run([sys.executable, PROGRAM, kind, str(depth), *given], capture_output=True, text=True, timeout=240)
    if done.returncode:
        assert "RecursionError" in done.stderr, done.stderr[-3000:]
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(sys.version_info[:2] > (3, 11), reason="how deep the bare program gets is that of Python 3.10 and 3.11")
@pytest.mark.parametrize("kind", ["L0", "mix", "monitor"])
def test_a_model_that_trains_without_the_probe_trains_with_it(kind: str) -> None:
    """At a depth at which hooks of anybody would end the training."""
    bare = train("bare", DEPTH)
    assert bare is not None
    seen = train(kind, DEPTH)
    assert seen is not None
    assert seen["loss"] == bare["loss"]
    assert not seen["said"]
    before, *during, after = seen["limits"]
    assert max(during) <= before + before // 3 + 100
    if kind == "monitor":  # hooks of a dump stay on
        assert before == after


@pytest.fixture(scope="module")
def least_room() -> int:
    """Frames that ten modules in each other need, with hooks of the program's own."""
    return next(room for room in range(44, 200, 4) if train("hooks", 10, room) is not None)


@pytest.mark.parametrize("kind", ["L0", "mix", "monitor"])
def test_without_room_the_probe_goes_and_the_training_stays(kind: str, least_room: int) -> None:
    """The program's own limit leaves fewer frames than our hooks need, and enough for those of the program itself."""
    seen = train(kind, 10, least_room + 8)
    assert seen is not None
    bare = train("bare", 10)
    assert bare is not None
    assert seen["loss"] == bare["loss"]
    parts = [text.partition(" is switched off")[0] for text in seen["said"] if "RecursionError" in text]
    assert len(parts) == len(set(parts)) > 0, seen["said"]
