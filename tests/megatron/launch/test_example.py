"""examples/megatron/run.sh as it is."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.framework
@pytest.mark.slow  # the script itself is also started by tests/monitor_pages/test_monitor_page.py
def test_run(tmp_path: Path) -> None:
    """Two ranks of an unchanged script with a parser of its own: the files that the README names are there, with every step."""
    scripts = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OUTPUT": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("MEGATRON_LM", None)
    script = ROOT / "examples" / "megatron" / "run.sh"
    done = subprocess.run(["sh", str(script)], env=environment, capture_output=True, text=True, timeout=200, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-4000:]
    assert "msprobe is on: monitor, incidents" in text
    assert text.count("loss") >= 6
    for rank in (0, 1):
        (file,) = (tmp_path / "monitor").glob(f"*rank{rank}*/scalars_0-99.csv")
        with file.open() as stream:
            found = {(row["step"], row["name"]) for row in csv.DictReader(stream)}
        assert {(str(step), name) for step in range(6) for name in ("loss", "grad_norm", "learning_rate", "skipped")} <= found
        assert len(list((tmp_path / "monitor").glob(f"*rank{rank}*/grad_reduced_0-99.csv"))) == 1
        assert (tmp_path / "tensorboard" / f"rank{rank}").is_dir()
