"""Checkpoints that real frameworks write, once for all tests of a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def megatron_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one of each of `megatron_writer.CASES`, written by megatron-core in processes of its own. Do not write into it."""
    target = tmp_path_factory.mktemp("megatron")
    script = Path(__file__).with_name("megatron_writer.py")
    done = subprocess.run([sys.executable, str(script), str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return target
