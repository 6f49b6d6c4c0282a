"""The launch line of a Lightning script, which starts its second rank itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.framework
def test_launch(tmp_path: Path) -> None:
    """`msprobe run` before the line: ranks that Lightning starts as processes, or forks, write what they have seen of every step; losses
    and parameters come out as without it."""
    probe = [sys.executable, "-m", "msprobe", "run", "--config", "probe.yaml", "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    outputs = []
    for number, (before, strategy) in enumerate((([], "ddp_fork"), (probe, "ddp_fork"), (probe, "ddp"))):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "probe.yaml").write_text("output_dir: out\nstrict: true\nmonitor: {gradients: true}\n")
        command = [*before, sys.executable, str(Path(__file__).with_name("pl_script.py")), strategy]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append([text for text in done.stdout.splitlines() if text.startswith("PARAMETERS")])
        for rank in (0, 1) if before else ():
            (scalars,) = (place / "out").glob(f"monitor/*-rank{rank}-*/scalars_0-99.csv")
            assert {row.split(",")[0] for row in scalars.read_text().splitlines()[1:]} == {str(step) for step in range(4)}
            assert list((place / "out").glob(f"monitor/*-rank{rank}-*/grad_reduced_0-99.csv"))
    assert outputs[0]
    assert outputs == [outputs[0]] * 3
