"""A long run with a dump on every tenth step leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm

SOAK = Path(__file__).parents[3] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "arguments"),
    [(600, ["--task", "statistics", "--level", "mix"]), (600, ["--task", "tensor", "--level", "L0", "--format", "packed"])],
)
def test_nothing_grows(steps: int, arguments: list[str]) -> None:
    """After the first 200 steps memory, open files, threads, hooks, function modes and living objects stay as they are; between dumps
    no hook and no mode is there."""
    code = f"import runpy; runpy.run_path({str(SOAK)!r}, run_name='__main__')"
    environment = {**os.environ, "MSPROBE_LOG_LEVEL": "3"}
    done = warm.run(code, "--steps", steps, "--json", *arguments, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    first, *rest = (dict(window) for window in json.loads(done.stdout))
    assert rest
    for window in rest:
        assert (window["hooks"], window["modes"]) == (0, 0)
        assert window["files"] <= first["files"]
        assert window["threads"] <= first["threads"]
    dumps = 20 * (len(rest) - 1)  # the first windows fill caches
    assert rest[-1]["objects"] - rest[0]["objects"] < 10 * dumps, "ten objects or more stay behind each dump"
    assert rest[-1]["resident"] - first["resident"] < 12e6, [w["resident"] for w in rest]
