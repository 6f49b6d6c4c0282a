"""Trainings in processes of their own, with what was collected of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("checked_training.py")


@pytest.fixture(scope="session")
def train() -> Callable[..., str]:
    """``train(pack, ranks=1, python=..., environment=..., **given)``: runs the script; the hash of what came out (of all ranks)."""

    def run(pack: Path | str, ranks: int = 0, python: str = sys.executable, environment: dict[str, str] | None = None, **given: str) -> str:
        words = [str(SCRIPT), str(pack), *(f"{key}={value}" for key, value in given.items())]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
        done = subprocess.run(
            [python, *launcher, *words],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        run.said = done.stderr  # type: ignore[attr-defined]
        return "".join(sorted(line for line in done.stdout.split() if len(line) == 64))

    return run
