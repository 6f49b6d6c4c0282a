"""torchtitan's own entry point behind `msprobe run`, in two ranks of torchrun. It takes a GPU for granted: the CPU stands in for it."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.frameworks import torchtitan_trainer as titan

pytestmark = pytest.mark.framework
TESTS = Path(__file__).parents[2]
_STEP = re.compile(r"step:\s+(\d+).*?loss:\s+([\d.]+).*?grad_norm:\s+([\d.]+)")


@pytest.mark.slow
def test_launch(tmp_path: Path) -> None:
    """The line as it is, with `msprobe run` before it: every rank has all steps, with the loss and the gradient norm that torchtitan
    prints itself."""
    titan.assets(tmp_path / "run")
    (tmp_path / "probe.yaml").write_text("output_dir: out\nstrict: true\nmonitor: {gradients: true}\n")
    script = [str(Path(__file__).with_name("titan_launch.py")), str(tmp_path / "run"), "--module", "titan_launch", "--config", "small"]
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *script]
    probe = [sys.executable, "-m", "msprobe", "run", "--config", "probe.yaml", "--"]
    path = os.pathsep.join(str(TESTS / name) for name in ("training", "frameworks"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf"), "NO_COLOR": "1"}
    done = subprocess.run(probe + line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = {int(step) - 1: (float(loss), float(norm)) for step, loss, norm in _STEP.findall(done.stdout + done.stderr)}
    assert {0, 1} <= set(printed)
    for rank in (0, 1):
        (file,) = (tmp_path / "out").glob(f"monitor/*-rank{rank}-*/scalars_0-99.csv")
        rows = list(csv.DictReader(file.read_text().splitlines()))
        found = {(int(row["step"]), row["name"]): float(row["value"]) for row in rows}
        assert {step for step, _ in found} == {0, 1, 2}
        for step, (loss, norm) in printed.items():
            assert found[step, "global_avg_loss"] == pytest.approx(loss, abs=1e-4)
            assert found[step, "grad_norm"] == pytest.approx(norm, abs=1e-3)
