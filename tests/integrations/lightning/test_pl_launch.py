"""The launch line of a Lightning script, which starts its second rank itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_checks import installed


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_launch(tmp_path: Path, cells: Any, strategy: str) -> None:
    """`msprobe run` before the line: ranks that Lightning starts as processes, or forks, write what they have seen of every step; losses
    and parameters come out as without it."""
    (tmp_path / "probe.yaml").write_text("output_dir: out\nstrict: true\nmonitor: {gradients: true}\n")
    line = [sys.executable, str(Path(__file__).with_name("pl_script.py")), strategy]
    probe = [sys.executable, "-m", "msprobe", "run", "--config", "probe.yaml", "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    outputs = []
    for command in (line, probe + line):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append([text for text in done.stdout.splitlines() if text.startswith("PARAMETERS")])
    assert outputs[0]
    assert outputs[0] == outputs[1]
    for rank in (0, 1):
        (scalars,) = (tmp_path / "out").glob(f"monitor/*-rank{rank}-*/scalars_0-99.csv")
        assert {row.split(",")[0] for row in scalars.read_text().splitlines()[1:]} == {str(step) for step in range(4)}
        assert list((tmp_path / "out").glob(f"monitor/*-rank{rank}-*/grad_reduced_0-99.csv"))
    cells.ran("Lightning", "DDP, 2 ranks", "same bits", version=installed("lightning"))
