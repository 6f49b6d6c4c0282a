"""Programs that need nearly all of Python's recursion limit, or are interrupted by signals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import warm

# Models whose modules lie so deep in each other that the bare program needs nearly all of Python's limit of recursion.

PROGRAM = Path(__file__).with_name("nested_model.py")
DEPTH = 240
"""The bare program trains at it (it dies near 248 with the limit of 1000), with empty hooks of torch's it does not (near 198)."""


def train(kind: str, depth: int, room: int = 0) -> dict[str, Any] | None:
    """What the program printed; None where it died of a RecursionError."""
    given = [str(room)] if room else []
    done = warm.run(warm.script(PROGRAM), kind, depth, *given, timeout=240)
    if done.returncode:
        assert "RecursionError" in done.stderr, done.stderr[-3000:]
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(sys.version_info[:2] > (3, 11), reason="how deep the bare program gets is that of Python 3.10 and 3.11")
@pytest.mark.parametrize("kind", [pytest.param("L0", marks=pytest.mark.slow), "mix", pytest.param("monitor", marks=pytest.mark.slow)])
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


@pytest.mark.slow
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


# A handler of the program's signals may raise while code of the probe runs: the program gets its exception, wherever that is.

INTERRUPTED = Path(__file__).with_name("interrupted_training.py")
SLOW = [pytest.param(mode, 200, marks=pytest.mark.slow) for mode in ("monitor", "statistics", "tensor")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "count"), [("statistics", 8), *SLOW])
@pytest.mark.slow
def test_an_exception_at_any_line_of_the_probe_reaches_the_program(mode: str, count: int) -> None:
    """A sample of the some 6,000 lines that run on the training's thread."""
    done = warm.run(warm.script(INTERRUPTED), mode, count, timeout=3600)
    assert not done.returncode, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert not found["wrong"]
    assert found["passed"] > 0.8 * found["tried"]
